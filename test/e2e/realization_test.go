// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kube/podhealth"
	"github.com/semmoe/operator/internal/model/reshuffle"
	"github.com/semmoe/operator/internal/router"
	"github.com/semmoe/operator/test/tier"
)

// answer is the client's view of a greedy completion, and the plan by which its rank was chosen.
type answer struct {
	Text, RoutedExperts string
	plan                string
}

// greedy requests completions of a few prompts, with the experts that they activated.
func greedy(t *testing.T, url string) []answer {
	t.Helper()
	var answers []answer
	for _, prompt := range []string{"func main() {", "SELECT name, id FROM users", "der Hund und die Katze", "the history of the city"} {
		body := fmt.Sprintf(`{"text": %q, "return_routed_experts": true, "sampling_params": {"temperature": 0, "max_new_tokens": 12}}`, prompt)
		response, err := http.Post(url+"/generate", "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(response.Body)
		response.Body.Close()
		var decoded struct {
			Text string
			Meta struct {
				RoutedExperts string `json:"routed_experts"`
			} `json:"meta_info"`
		}
		if err == nil {
			err = json.Unmarshal(data, &decoded)
		}
		if err != nil || response.StatusCode != http.StatusOK || decoded.Meta.RoutedExperts == "" {
			t.Fatalf("%s: %v: %s", response.Status, err, data)
		}
		answers = append(answers, answer{decoded.Text, decoded.Meta.RoutedExperts, response.Header.Get(router.HeaderPlan)})
	}
	return answers
}

// waitScored waits until requests are routed by a plan.
func waitScored(t *testing.T, url, digest string) {
	t.Helper()
	eventually(t, waitTimeout, "requests are routed by the plan", func() error {
		if got := greedy(t, url)[0].plan; got != digest {
			return fmt.Errorf("plan %q, want %q", got, digest)
		}
		return nil
	})
}

// sameAnswers compares the answers that clients get.
func sameAnswers(t *testing.T, what string, want, got []answer) {
	t.Helper()
	for i := range want {
		if want[i].Text != got[i].Text {
			t.Errorf("%s: the text changed from %q to %q", what, want[i].Text, got[i].Text)
		}
		if want[i].RoutedExperts != got[i].RoutedExperts {
			t.Errorf("%s: the routed experts of %q changed", what, want[i].Text)
		}
	}
}

// TestRealizations serves the same plan with both realizations. Both give the same answers as no plan, and return the
// same logical expert IDs. The reshuffled copy of the checkpoint is made once, in a cache that the pods share.
func TestRealizations(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace, cache := newNamespace(t), t.TempDir()
	startManager(t, namespace, nil)
	create(t, dataset(t, namespace, 8))
	moed := profiledDeployment(namespace, func(m *semmoev1.MoEDeployment) {
		m.Spec.Placement.Approval = semmoev1.ApprovalManual
		m.Spec.Placement.Cache = &semmoev1.CacheSpec{Volume: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: cache}}}
	})
	create(t, moed)
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionRolledOut, metav1.ConditionFalse, "AwaitingApproval")
	url := serviceURL(t, moed)
	before := greedy(t, url)
	planned := planConfigMap(t, moed)
	digest := planned.Annotations[semmoev1.AnnotationPlanDigest][:16]
	approve := func(m *semmoev1.MoEDeployment) { m.Annotations = map[string]string{semmoev1.AnnotationApprove: digest} }

	update(t, moed, approve)
	waitPlanned(t, moed)
	waitCondition(t, moed, semmoev1.ConditionRolledOut, metav1.ConditionTrue, "RolledOut", digest, "by the engine's expert map")
	waitScored(t, url, digest)
	sameAnswers(t, "expert map", before, greedy(t, url))

	// Store a copy with another permutation under the name of this plan's copy. No pod may become ready with it.
	model := get(t, moed).Status.Model.Digest
	out := filepath.Join(cache, model[:16]+"-"+digest)
	wrong, err := reshuffle.ParsePermutation([]byte(fmt.Sprintf(`{"layers":[{"layer":0,"new_to_old":%s}]}`, reversed(32))))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := reshuffle.Run(t.Context(), reshuffle.Options{Model: checkpointDir(), Permutation: wrong, Out: out}); err != nil {
		t.Fatal(err)
	}
	update(t, moed, func(m *semmoev1.MoEDeployment) {
		m.Spec.Placement.Realization = semmoev1.RealizationReshuffledWeights
	})
	waitCondition(t, moed, semmoev1.ConditionDegraded, metav1.ConditionTrue, "ContainerCrashing", "holds another checkpoint", "permutation")
	for _, pod := range listEnginePods(t, moed) {
		if pod.Annotations[semmoev1.AnnotationRealization] != "" && podhealth.Ready(&pod) {
			t.Errorf("pod %s is ready with weights of another permutation", pod.Name)
		}
	}
	sameAnswers(t, "while the copy is wrong", before, greedy(t, url))
	if err := os.RemoveAll(out); err != nil {
		t.Fatal(err)
	}

	waitPlanned(t, moed)
	waitCondition(t, moed, semmoev1.ConditionRolledOut, metav1.ConditionTrue, "RolledOut", digest, "by reshuffled weights")
	waitScored(t, url, digest)
	sameAnswers(t, "reshuffled weights", before, greedy(t, url))
	reshuffled := get(t, moed).Status.Reshuffle
	if reshuffled == nil || reshuffled.Made != 1 || reshuffled.Found != 1 || reshuffled.Bytes == 0 {
		t.Errorf("status.reshuffle is %+v, want one copy for the two pods that share a cache", reshuffled)
	}
	for _, pod := range listEnginePods(t, moed) {
		if args := strings.Join(pod.Spec.Containers[0].Args, " "); strings.Contains(args, "--init-expert-location") || !strings.Contains(args, semmoev1.CacheMountPath) {
			t.Errorf("the engine of pod %s is started with %s", pod.Name, args)
		}
	}
	// Lost reference answers are stored again by a pod that has verified its own answers.
	if err := api.DeleteAllOf(t.Context(), &corev1.ConfigMap{}, client.InNamespace(namespace), client.MatchingLabels{semmoev1.LabelComponent: semmoev1.ComponentAnswers}); err != nil {
		t.Fatal(err)
	}
	eventually(t, waitTimeout, "the answers are stored again", func() error { return answersStored(t, moed) })

	// Pods with permuted weights are profiled by logical expert IDs. With physical IDs the default placement would be
	// as local as the plan.
	first := get(t, moed).Status
	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Profiling.RequestTokens++ })
	eventually(t, waitTimeout, "a new profile and plan are made", func() error {
		current := get(t, moed)
		if current.Status.Profile == first.Profile || current.Status.Plan == first.Plan || current.Status.Plan == "" {
			return errors.New("no new profile or plan yet")
		}
		again := &semmoev1.PlacementPlan{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: current.Status.Plan}}
		if err := api.Get(t.Context(), client.ObjectKeyFromObject(again), again); err != nil {
			return err
		}
		if again.Status.Forecast == nil {
			return errors.New("no forecast yet")
		}
		if apart := again.Status.Forecast.BaselineMilli - *first.LAR.BaselineMilli; max(apart, -apart) > 30 {
			t.Errorf("the rate of the default placement is %s, was %s", again.Status.Forecast.BaselineSummary, first.LAR.BaselineSummary)
		}
		return nil
	})
}

func answersStored(t *testing.T, moed *semmoev1.MoEDeployment) error {
	t.Helper()
	var list corev1.ConfigMapList
	if err := api.List(t.Context(), &list, client.InNamespace(moed.Namespace), client.MatchingLabels{semmoev1.LabelComponent: semmoev1.ComponentAnswers}); err != nil {
		return err
	}
	if len(list.Items) != 1 || list.Items[0].DeletionTimestamp != nil {
		return fmt.Errorf("%d ConfigMaps with answers", len(list.Items))
	}
	return nil
}

// TestChangedOutputRolledBack runs an engine that loads its weights by the expert map and ignores the map at
// dispatch. The engine is detected before it serves, and the plan is rolled back. If the operator may choose, it
// realizes the plan by reshuffled weights instead.
func TestChangedOutputRolledBack(t *testing.T) {
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	create(t, dataset(t, namespace, 8))
	moed := profiledDeployment(namespace, func(m *semmoev1.MoEDeployment) {
		m.Spec.Engine.Args = []string{"--fault", "ignore-expert-map-at-dispatch"}
		m.Spec.Placement.Realization = semmoev1.RealizationEngineMap
		m.Spec.Placement.Approval = semmoev1.ApprovalManual
	})
	create(t, moed)
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionRolledOut, metav1.ConditionFalse, "AwaitingApproval")
	url := serviceURL(t, moed)
	before := greedy(t, url)
	digest := planConfigMap(t, moed).Annotations[semmoev1.AnnotationPlanDigest][:16]
	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Annotations = map[string]string{semmoev1.AnnotationApprove: digest} })

	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionRolledOut, metav1.ConditionFalse, "OutputChanged", digest, "the engine's expert map")
	eventually(t, waitTimeout, "the plan is rolled back", func() error {
		current := get(t, moed)
		if workloads := listWorkloads(t, moed); len(workloads) != 1 || workloads[0].Annotations[semmoev1.AnnotationPlanDigest] != "" {
			return fmt.Errorf("%d workloads", len(workloads))
		}
		if current.Status.UpdatedReplicas != 2 || current.Status.PlanDigest != "" {
			return fmt.Errorf("status is %+v", current.Status)
		}
		return conditionIs(current.Status.Conditions, current.Generation, semmoev1.ConditionDegraded, metav1.ConditionTrue, "OutputChanged")
	})
	sameAnswers(t, "after the rollback", before, greedy(t, url))
	pods := podUIDs(t, moed)

	// The failed plan is not tried again, even after the status is lost.
	wipeStatus(t, moed)
	waitConditionWithin(t, waitTimeout, moed, semmoev1.ConditionRolledOut, metav1.ConditionFalse, "OutputChanged")
	if diff := cmp.Diff(pods, podUIDs(t, moed)); diff != "" {
		t.Errorf("pods were replaced (-before +after):\n%s", diff)
	}

	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Placement.Realization = semmoev1.RealizationAuto })
	waitPlanned(t, moed)
	waitCondition(t, moed, semmoev1.ConditionRolledOut, metav1.ConditionTrue, "RolledOut", "by reshuffled weights, because outputs change with the engine's expert map")
	waitScored(t, url, digest)
	sameAnswers(t, "reshuffled weights", before, greedy(t, url))
}

// reversed returns the numbers n-1 to 0 as JSON.
func reversed(n int) string {
	order := make([]int, n)
	for i := range order {
		order[i] = n - 1 - i
	}
	text, _ := json.Marshal(order) //nolint:errcheck // integers
	return string(text)
}
