// SPDX-License-Identifier: Apache-2.0

// Package openshift emulates the admission of OpenShift at an API server: the security context constraint
// restricted-v2, which accepts only users and groups from a range that belongs to the namespace.
package openshift

import (
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// User is in the range of each namespace.
const User = 1000680000

//go:embed policy.yaml
var policy []byte

// Restrict makes the API server reject pods of all namespaces whose user or group is outside the range, and waits until
// it does: a new policy applies after a delay.
func Restrict(ctx context.Context, api client.Client) error {
	if err := each(func(u *unstructured.Unstructured) error { return api.Create(ctx, u) }); err != nil {
		return err
	}
	var admitted error
	err := wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		if err := api.Create(ctx, pod(1000), client.DryRunAll); ctx.Err() == nil {
			admitted = err
		}
		return Rejected(admitted), nil
	})
	if err != nil {
		return fmt.Errorf("the policy has no effect: %w: a pod with user 1000: %v", err, admitted)
	}
	if err := api.Create(ctx, pod(User), client.DryRunAll); err != nil {
		return fmt.Errorf("the policy rejects a user of the range: %w", err)
	}
	return nil
}

// Remove removes what Restrict has added.
func Remove(ctx context.Context, api client.Client) error {
	return each(func(u *unstructured.Unstructured) error { return api.Delete(ctx, u) })
}

// each calls a function with the policy and its binding.
func each(call func(*unstructured.Unstructured) error) error {
	for documents := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(policy), 4096); ; {
		u := &unstructured.Unstructured{}
		if err := documents.Decode(u); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if err := call(u); err != nil {
			return err
		}
	}
}

// Rejected reports whether an error is a rejection by the policy.
func Rejected(err error) bool {
	return err != nil && strings.Contains(err.Error(), "must be in the ranges: [")
}

func pod(user int64) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "user"},
		Spec: corev1.PodSpec{
			AutomountServiceAccountToken: ptr.To(false),
			Containers:                   []corev1.Container{{Name: "user", Image: "user", SecurityContext: &corev1.SecurityContext{RunAsUser: &user}}},
		},
	}
}
