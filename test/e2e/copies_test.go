package e2e

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// A plan with copies of experts serves in an engine that has room for them, answers as the model does without a plan, and promises more
// than the same plan without copies.
func TestCopiesOfExperts(t *testing.T) {
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	storedProfile(t, namespace)
	moed := storyDeployment(namespace)
	// Without an all-to-all backend SGLang computes wrong answers with copies, or ends at start: the plan would be refused.
	moed.Spec.Engine.Args = append(moed.Spec.Engine.Args, "--moe-a2a-backend=deepep")
	create(t, moed)
	plain := waitPlanned(t, moed).Status
	url := reach(t, moed)
	waitScored(t, url, plain.PlanDigest)
	before := greedy(t, url)

	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Placement.RedundantExperts = ptr.To(intstr.FromInt32(8)) })
	waitOtherPlan(t, moed, plain.PlanDigest, func() {})
	copies := get(t, moed).Status
	waitCondition(t, moed, semmoev1.ConditionRolledOut, metav1.ConditionTrue, "RolledOut", copies.PlanDigest)
	waitScored(t, url, copies.PlanDigest)
	sameAnswers(t, "copies", before, greedy(t, url))
	if with, without := *copies.LAR.PredictedMilli, *plain.LAR.PredictedMilli; with <= without {
		t.Errorf("with copies %d thousandths are promised to be local, without %d", with, without)
	}
	for _, pod := range listEnginePods(t, moed) {
		args := strings.Join(pod.Spec.Containers[0].Args, " ")
		for _, flag := range []string{"--ep-num-redundant-experts 8", "--ep-dispatch-algorithm static"} {
			if !strings.Contains(strings.ReplaceAll(args, "=", " "), flag) {
				t.Errorf("the engine of %s is started without %s: %s", pod.Name, flag, args)
			}
		}
	}
}
