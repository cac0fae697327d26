// SPDX-License-Identifier: Apache-2.0

package store

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/semmoe/operator/internal/artifact"
)

const (
	profileID = "0123456789abcdef"
	planID    = "fedcba9876543210"
)

var planDigest = planID + strings.Repeat("0", 48)

func profilePod(name string) *corev1.Pod {
	return makePod(name, map[string]string{"semmoe.io/component": "profile", "semmoe.io/inputs": profileID}, nil, "Job")
}

func makePod(name string, labels, annotations map[string]string, owner string) *corev1.Pod {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: name, Labels: labels, Annotations: annotations}}
	if owner != "" {
		pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "batch/v1", Kind: owner, Name: "owner", UID: "1", Controller: ptr.To(true)}}
	}
	return pod
}

func TestAuthorize(t *testing.T) {
	profile := artifact.Scope{Namespace: "team-a", Kind: artifact.Profile, ID: profileID}
	plan := artifact.Scope{Namespace: "team-a", Kind: artifact.Plan, ID: planID}
	in := func(s artifact.Scope, namespace string) artifact.Scope { s.Namespace = namespace; return s }
	id := func(s artifact.Scope, id string) artifact.Scope { s.ID = id; return s }

	profiler := profilePod("p")
	ended := profilePod("p")
	ended.Status.Phase = corev1.PodSucceeded
	failed := profilePod("p")
	failed.Status.Phase = corev1.PodFailed
	unowned := profilePod("p")
	unowned.OwnerReferences = nil
	notControlled := profilePod("p")
	notControlled.OwnerReferences[0].Controller = nil
	replicated := profilePod("p")
	replicated.OwnerReferences[0].Kind = "ReplicaSet"
	engine := makePod("e", map[string]string{"semmoe.io/component": "engine"}, map[string]string{"semmoe.io/plan-digest": planDigest}, "StatefulSet")
	short := makePod("e", map[string]string{"semmoe.io/component": "engine"}, map[string]string{"semmoe.io/plan-digest": planID}, "StatefulSet")
	follower := makePod("e", nil, map[string]string{"semmoe.io/plan-digest": planDigest, "semmoe.io/follow-tables": "true"}, "StatefulSet")
	aimless := makePod("e", nil, map[string]string{"semmoe.io/follow-tables": "true"}, "StatefulSet")
	unplanned := makePod("e", map[string]string{"semmoe.io/component": "engine", "semmoe.io/inputs": profileID}, nil, "StatefulSet")
	router := makePod("r", map[string]string{"semmoe.io/component": "router"}, nil, "ReplicaSet")
	stranger := makePod("s", nil, nil, "")

	cases := map[string]struct {
		pod   *corev1.Pod
		scope artifact.Scope
		verbs string // allowed verbs
	}{
		"profile, own inputs":              {profiler, profile, "read write"},
		"profile, other inputs":            {profiler, id(profile, "ffffffffffffffff"), ""},
		"profile, other namespace":         {profiler, in(profile, "team-b"), ""},
		"profile, plan":                    {profiler, plan, ""},
		"profile, plan of the same id":     {profiler, id(plan, profileID), ""},
		"profile that has succeeded":       {ended, profile, ""},
		"profile that has failed":          {failed, profile, ""},
		"profile without a Job":            {unowned, profile, ""},
		"profile that a Job does not own":  {notControlled, profile, ""},
		"profile of another workload":      {replicated, profile, ""},
		"engine, its plan":                 {engine, plan, "read"},
		"engine, other plan":               {engine, id(plan, profileID), ""},
		"engine, its plan elsewhere":       {engine, in(plan, "team-b"), ""},
		"engine, profile":                  {engine, profile, ""},
		"engine, profile of the plan's id": {engine, id(profile, planID), ""},
		"follower, other plan":             {follower, id(plan, profileID), "read"},
		"follower, plan elsewhere":         {follower, in(plan, "team-b"), ""},
		"follower, profile":                {follower, profile, ""},
		"follower without a plan":          {aimless, plan, ""},
		"engine with half a digest":        {short, plan, ""},
		"engine without a plan":            {unplanned, plan, ""},
		"engine with a profile's label":    {unplanned, profile, ""},
		"router, any plan":                 {router, plan, "read"},
		"router, plan elsewhere":           {router, in(plan, "team-b"), ""},
		"router, profile":                  {router, profile, ""},
		"stranger, profile":                {stranger, profile, ""},
		"stranger, plan":                   {stranger, plan, ""},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			for _, verb := range []Verb{Read, Write, Delete} {
				err := Authorize(tc.pod, verb, tc.scope)
				if allowed := strings.Contains(tc.verbs, string(verb)); allowed != (err == nil) {
					t.Errorf("%s: error %v, want allowed: %t", verb, err, allowed)
				}
				if err != nil && !strings.Contains(err.Error(), "team-a/"+tc.pod.Name) {
					t.Errorf("%s: %q does not contain the name of the pod", verb, err)
				}
			}
		})
	}
}
