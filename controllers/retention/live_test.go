// SPDX-License-Identifier: Apache-2.0

package retention

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
)

var digest = strings.Repeat("0123456789abcdef", 4)

const short, inputs = "0123456789abcdef", "fedcba9876543210"

func stalledNow() []metav1.Condition {
	return []metav1.Condition{{Type: semmoev1.ConditionStalled, Status: metav1.ConditionTrue, ObservedGeneration: 1}}
}

func object(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: "ns", Name: name, Generation: 1}
}

func TestLive(t *testing.T) {
	profiles := func(id string) artifact.Scope {
		return artifact.Scope{Namespace: "ns", Kind: artifact.Profile, ID: id}
	}
	plans := func(id string) artifact.Scope {
		return artifact.Scope{Namespace: "ns", Kind: artifact.Plan, ID: id}
	}
	configMap := metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: "p-" + short, Labels: map[string]string{semmoev1.LabelInputs: inputs}, Annotations: map[string]string{semmoev1.AnnotationPlanDigest: digest},
	}}
	for name, test := range map[string]struct {
		references references
		scopes     []artifact.Scope
		namespaces []string
	}{
		"nothing": {},
		"deployment without a profile yet": {
			references: references{Deployments: []semmoev1.MoEDeployment{{ObjectMeta: object("m"), Spec: semmoev1.MoEDeploymentSpec{Profiling: &semmoev1.ProfilingSpec{}}}}},
			namespaces: []string{"ns"},
		},
		"deployment with a profile": {
			references: references{Deployments: []semmoev1.MoEDeployment{{
				ObjectMeta: object("m"), Spec: semmoev1.MoEDeploymentSpec{Profiling: &semmoev1.ProfilingSpec{}},
				Status: semmoev1.MoEDeploymentStatus{Conditions: []metav1.Condition{{Type: semmoev1.ConditionProfiled, Status: metav1.ConditionTrue}}},
			}}},
		},
		"stalled deployment": {
			references: references{Deployments: []semmoev1.MoEDeployment{{
				ObjectMeta: object("m"), Spec: semmoev1.MoEDeploymentSpec{Profiling: &semmoev1.ProfilingSpec{}}, Status: semmoev1.MoEDeploymentStatus{Conditions: stalledNow()},
			}}},
		},
		"deployment without profiling": {references: references{Deployments: []semmoev1.MoEDeployment{{ObjectMeta: object("m")}}}},
		"profile": {
			references: references{Profiles: []semmoev1.AffinityProfile{{ObjectMeta: object("p"), Status: semmoev1.AffinityProfileStatus{Inputs: inputs}}}},
			scopes:     []artifact.Scope{profiles(inputs)},
		},
		"profile without inputs": {
			references: references{Profiles: []semmoev1.AffinityProfile{{ObjectMeta: object("p")}}},
			namespaces: []string{"ns"},
		},
		"stalled profile": {
			references: references{Profiles: []semmoev1.AffinityProfile{{ObjectMeta: object("p"), Status: semmoev1.AffinityProfileStatus{Conditions: stalledNow()}}}},
		},
		"plan": {
			references: references{
				Plans:      []semmoev1.PlacementPlan{{ObjectMeta: object("p"), Status: semmoev1.PlacementPlanStatus{Plan: short, ConfigMap: "p-" + short}}},
				ConfigMaps: []metav1.PartialObjectMetadata{configMap},
			},
			scopes: []artifact.Scope{plans(inputs), plans(short)},
		},
		"plan without its ConfigMap": {
			references: references{Plans: []semmoev1.PlacementPlan{{ObjectMeta: object("p"), Status: semmoev1.PlacementPlanStatus{Plan: short, ConfigMap: "p-" + short}}}},
			scopes:     []artifact.Scope{plans(short)},
			namespaces: []string{"ns"},
		},
		"plan without status": {
			references: references{Plans: []semmoev1.PlacementPlan{{ObjectMeta: object("p")}}},
			namespaces: []string{"ns"},
		},
		"plan stalled in an earlier generation": {
			references: references{Plans: []semmoev1.PlacementPlan{{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Generation: 2}, Status: semmoev1.PlacementPlanStatus{Conditions: stalledNow()}}}},
			namespaces: []string{"ns"},
		},
		"stalled plan": {
			references: references{Plans: []semmoev1.PlacementPlan{{ObjectMeta: object("p"), Status: semmoev1.PlacementPlanStatus{Conditions: stalledNow()}}}},
		},
		"ConfigMap without a plan": {
			references: references{ConfigMaps: []metav1.PartialObjectMetadata{configMap}},
			scopes:     []artifact.Scope{plans(inputs), plans(short)},
		},
		"plan that replaces another one": {
			references: references{Plans: []semmoev1.PlacementPlan{{
				ObjectMeta: object("p"), Spec: semmoev1.PlacementPlanSpec{Current: &semmoev1.CurrentPlan{PlanDigest: digest, TablesDigest: strings.Repeat(inputs, 4)}},
			}}},
			scopes:     []artifact.Scope{plans(short), plans(inputs)},
			namespaces: []string{"ns"},
		},
		"tables": {
			references: references{Tables: []corev1.ConfigMap{
				{ObjectMeta: object("t"), Data: map[string]string{semmoev1.TablesKey: fmt.Sprintf(`{%q:%q}`, digest, strings.Repeat(inputs, 4))}},
				{ObjectMeta: object("none"), Data: map[string]string{semmoev1.TablesKey: `{}`}},
			}},
			scopes: []artifact.Scope{plans(short), plans(inputs)},
		},
		"damaged tables": {
			references: references{Tables: []corev1.ConfigMap{{ObjectMeta: object("t"), Data: map[string]string{semmoev1.TablesKey: "{"}}}},
			namespaces: []string{"ns"},
		},
		"pods": {
			references: references{Annotated: []metav1.ObjectMeta{
				object("without"),
				{Namespace: "ns", Annotations: map[string]string{semmoev1.AnnotationPlanDigest: digest}},
				{Namespace: "ns", Annotations: map[string]string{semmoev1.AnnotationPlanDigest: "nonsense"}},
			}},
			scopes: []artifact.Scope{plans(short)},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := liveOf(test.references)
			if diff := cmp.Diff(sets.New(test.scopes...), got.scopes, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("scopes (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(sets.New(test.namespaces...), got.namespaces, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("namespaces (-want +got):\n%s", diff)
			}
		})
	}
}

func TestDigests(t *testing.T) {
	stored := func(namespace, id, digest string) artifact.Artifact {
		return artifact.Artifact{Scope: artifact.Scope{Namespace: namespace, Kind: artifact.Plan, ID: id}, Digest: artifact.Digest(digest), Modified: time.Unix(0, 0)}
	}
	all := []artifact.Artifact{stored("ns", short, "referenced"), stored("ns", inputs, "unreferenced"), stored("busy", inputs, "protected"), stored("unwatched", inputs, "unwatched")}
	l := live{sets.New(all[0].Scope), sets.New("busy")}
	for name, test := range map[string]struct{ watched, want []string }{
		"all namespaces":  {nil, []string{"referenced", "protected"}},
		"some namespaces": {[]string{"ns", "busy"}, []string{"unwatched", "referenced", "protected"}},
	} {
		t.Run(name, func(t *testing.T) {
			want := sets.New[artifact.Digest]()
			for _, digest := range test.want {
				want.Insert(artifact.Digest(digest))
			}
			if diff := cmp.Diff(want, l.digests(all, test.watched)); diff != "" {
				t.Errorf("digests (-want +got):\n%s", diff)
			}
		})
	}
}
