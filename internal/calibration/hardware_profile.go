// SPDX-License-Identifier: Apache-2.0

package calibration

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/calibration/machines"
	"github.com/semmoe/operator/internal/kube/lookup"
)

// ReadProfile reads the hardware profile of a reference in a namespace. reader must not be cached. A missing or invalid
// profile is a *machines.ProfileError.
func ReadProfile(ctx context.Context, reader client.Reader, namespace string, of *semmoev1.HardwareReference) (machines.ResolvedProfile, error) {
	if of == nil || of.ConfigMap == nil {
		return machines.Resolve(of, namespace, nil)
	}
	configMap := &corev1.ConfigMap{}
	found, err := lookup.FindLive(ctx, reader, client.ObjectKey{Namespace: namespace, Name: of.ConfigMap.Name}, configMap)
	if err != nil {
		return machines.ResolvedProfile{}, fmt.Errorf("failed to get ConfigMap %s: %w", of.ConfigMap.Name, err)
	}
	if !found {
		configMap = nil
	}
	return machines.Resolve(of, namespace, configMap)
}
