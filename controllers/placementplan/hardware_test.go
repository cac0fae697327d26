// SPDX-License-Identifier: Apache-2.0

package placementplan

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/calibration/machines"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/plan/bundle"
	"github.com/semmoe/operator/solver/cost/hardware"
)

// slowProfile returns a hardware profile with a slow exchange, and its JSON text.
func slowProfile(t *testing.T) (*hardware.Profile, string) {
	t.Helper()
	slow := *hardware.DefaultProfile()
	slow.Name, slow.AllToAll.PerMicrosecond = "slow", slow.AllToAll.PerMicrosecond/10
	text, err := json.Marshal(slow)
	if err != nil {
		t.Fatal(err)
	}
	return &slow, string(text)
}

// TestPlanForUserHardware checks that a plan is solved for its hardware profile, contains it, and then no longer needs
// the ConfigMap of the profile. Errors of the profile are reported.
func TestPlanForUserHardware(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	slow, text := slowProfile(t)
	sum := sha256.Sum256([]byte(text))
	digest := hex.EncodeToString(sum[:])
	w.complete(w.newProfile("tiny"), traceFile(t))
	on := func(name, digest string) *semmoev1.PlacementPlan {
		return w.newPlan(name, "tiny", func(p *semmoev1.PlacementPlan) {
			p.Spec.Hardware = &semmoev1.HardwareReference{ConfigMap: &semmoev1.HardwareConfigMap{Name: "gpus"}}
			p.Spec.HardwareDigest = digest
		})
	}
	p, later := on("tiny", digest), on("later", strings.Repeat("0", 64))
	w.wait(p, semmoev1.ConditionReady, metav1.ConditionFalse, "HardwareProfileNotFound", `spec.hardware.configMap: there is no ConfigMap "gpus"`)
	gpus := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "gpus"}, Data: map[string]string{"hardware.json": "{}"}}
	w.create(gpus)
	reconcile := func() {
		profile := &semmoev1.AffinityProfile{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "tiny"}}
		w.touch(profile) // do not wait for the retry interval
	}
	reconcile()
	w.wait(p, semmoev1.ConditionDegraded, metav1.ConditionTrue, "HardwareProfileInvalid", `key "hardware.json" of ConfigMap gpus`)
	gpus.Data["hardware.json"] = text
	if err := api.Update(t.Context(), gpus); err != nil {
		t.Fatal(err)
	}
	reconcile()
	done := w.wait(p, semmoev1.ConditionReady, metav1.ConditionTrue, "Published")
	w.wait(later, semmoev1.ConditionReady, metav1.ConditionFalse, "HardwareProfileChanged", "spec.hardwareDigest", digest)
	solved, _, err := bundle.FetchPlan(t.Context(), w.client, w.namespace, done.Status.PlanDigest)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(slow, solved.Hardware); diff != "" || solved.Schedule == nil || solved.Schedule.Hardware != "slow" {
		t.Errorf("the plan contains another hardware profile, or none:\n%s", diff)
	}
	if data := w.configMap(done.Status.ConfigMap).Data; data[plan.HardwareFile] == "" {
		t.Errorf("the ConfigMap lacks %s", plan.HardwareFile)
	}

	plain := w.wait(w.newPlan("plain", "tiny"), semmoev1.ConditionReady, metav1.ConditionTrue, "Published")
	if plain.Status.PlanDigest == done.Status.PlanDigest {
		t.Error("the plan for other hardware has the same digest")
	}

	// Neither the ConfigMap nor the status is needed any more.
	stored := w.stored()
	w.delete(gpus)
	w.wipe(done)
	again := w.wait(p, semmoev1.ConditionReady, metav1.ConditionTrue, "Published")
	w.delete(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: done.Status.ConfigMap}})
	w.wait(p, semmoev1.ConditionDegraded, metav1.ConditionFalse, "AsExpected")
	w.configMap(done.Status.ConfigMap)
	if again.Status.PlanDigest != done.Status.PlanDigest {
		t.Errorf("plan digest changed from %s to %s", done.Status.PlanDigest, again.Status.PlanDigest)
	}
	if diff := cmp.Diff(stored, w.stored()); diff != "" {
		t.Errorf("the plan was solved again:\n%s", diff)
	}
}

// TestHardwareInInputs checks that the inputs of a plan without a user-provided hardware profile have no hardware
// field, as in earlier versions.
func TestHardwareInInputs(t *testing.T) {
	profile := &semmoev1.AffinityProfile{Status: semmoev1.AffinityProfileStatus{
		Result:     &semmoev1.ProfileResult{Digest: strings.Repeat("ab", 32)},
		Conditions: []metav1.Condition{{Type: semmoev1.ConditionReady, Status: metav1.ConditionTrue}},
	}}
	inputs := func(of *semmoev1.HardwareReference, asked string) *solveInputs {
		p := &semmoev1.PlacementPlan{Spec: semmoev1.PlacementPlanSpec{ExpertParallelSize: 4, Hardware: of, HardwareDigest: asked}}
		return inputsOf(p, profile, nil, machines.ResolvedProfile{})
	}
	inConfigMap := &semmoev1.HardwareReference{ConfigMap: &semmoev1.HardwareConfigMap{Name: "gpus", Key: "hardware.json"}}
	if plain, own := inputs(nil, ""), inputs(&semmoev1.HardwareReference{BuiltIn: hardware.Default}, ""); plain.ID() != own.ID() || plain.Hardware != "" {
		t.Errorf("inputs differ: %+v and %+v", plain, own)
	}
	if got := inputs(inConfigMap, ""); got != nil {
		t.Errorf("inputs with an unknown hardware profile = %+v, want nil", got)
	}
	if got := inputs(inConfigMap, "aa"); got == nil || got.Hardware != "aa" {
		t.Errorf("%+v", got)
	}
}
