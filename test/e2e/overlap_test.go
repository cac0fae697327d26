// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/test/faults"
	"github.com/semmoe/operator/test/tier"
)

// cooldownSeconds is a cool-down that no test outlives.
const cooldownSeconds = 24 * 3600

// overlapEngines are the engines with overlap flags: a release, the arguments that overlap needs, and the flags that mode
// Auto sets at large batches. SGLang splits every step, so its flags are removed at small batches. vLLM splits steps from a
// threshold, so its flags stay.
var overlapEngines = []struct {
	dialect, release string
	engine           semmoev1.EngineType
	args             []string
	env              []corev1.EnvVar
	flags            []string
	stays            bool
}{
	{dialect: "sglang", release: "0.5.12", engine: semmoev1.EngineSGLang, args: []string{"--moe-a2a-backend", "deepep", "--enable-metrics"}, flags: []string{"--enable-two-batch-overlap"}},
	{dialect: "vllm", release: "0.32.0", engine: semmoev1.EngineVLLM, args: []string{"--all2all-backend", "deepep_high_throughput"},
		// Without the variable, the engine chooses the other model runner to split steps, which returns no routed experts.
		env:   []corev1.EnvVar{{Name: "VLLM_USE_V2_MODEL_RUNNER", Value: "1"}},
		flags: []string{"--enable-dbo", "--dbo-decode-token-threshold", "--dbo-prefill-token-threshold"}, stays: true},
}

// TestOverlapAuto lets the operator choose the overlap settings of the test doubles of two engines. The settings for large
// batches come with the plan, as flags of the engine. Within the cool-down, much smaller batches change nothing. After it,
// they lead to one plan, and to one rollout if the settings differ.
func TestOverlapAuto(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	for _, test := range overlapEngines {
		t.Run(test.dialect, func(t *testing.T) {
			t.Parallel()
			adapter, err := registry.For(string(test.engine))
			if err != nil {
				t.Fatal(err)
			}
			namespace := newNamespace(t)
			journal := recordJournal(t, namespace)
			startManager(t, namespace, nil)
			storedProfile(t, namespace)
			create(t, slowHardware(t, namespace))
			moed := storyDeployment(namespace, func(m *semmoev1.MoEDeployment) {
				m.Spec.Engine = semmoev1.EngineSpec{
					Type: test.engine, Image: doubleImage, Command: slices.Concat([]string{"/engines", test.dialect + "-" + test.release}, adapter.Command),
					Args: test.args, Env: test.env, Overlap: &semmoev1.OverlapSpec{Mode: semmoev1.OverlapAuto},
				}
				m.Spec.Placement.Hardware = &semmoev1.HardwareReference{ConfigMap: &semmoev1.HardwareConfigMap{Name: "slow"}}
				m.Spec.Rollout.BatchTokens = 0
				m.Spec.Drift.CooldownSeconds, m.Spec.Drift.MaxReplansPerDay = ptr.To[int32](cooldownSeconds), ptr.To[int32](96)
			})
			create(t, moed)
			first := waitOneRevision(t, moed)
			large := waitOverlap(t, moed, nil, "Overlapping", "NoGainExpected")
			if large.Reason != "Overlapping" || large.MicroBatches != 2 || large.LayerNanos == 0 || large.LayerNanos >= large.UnsplitNanos {
				t.Fatalf("the settings for large batches are %+v", large)
			}
			checkOverlapFlags(t, moed, test.flags, true)
			pods, before := podUIDs(t, moed), rollouts(journal)

			defer sendSlowly(t, waitAnswers(t, moed), 120)()
			nudge := nudger(t, namespace)
			waitHeldBatches(t, moed, nudge)
			if after := podUIDs(t, moed); !slices.Equal(pods, after) || rollouts(journal) != before {
				t.Errorf("within the cool-down, pods %v became %v", pods, after)
			}

			// The cool-down passes, and begins again with the plan for the observed sizes.
			cooldown := func(seconds int32) {
				update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Drift.CooldownSeconds = ptr.To(seconds) })
			}
			cooldown(0)
			waitBatches(t, moed, semmoev1.BatchTokensObserved, nudge)
			cooldown(cooldownSeconds)
			small := waitOverlap(t, moed, large.BatchTokens, "Overlapping", "NoGainExpected")
			waitOneRevision(t, moed)
			checkOverlapFlags(t, moed, test.flags, test.stays)
			want := before + 1
			if test.stays {
				want = before
			}
			if got := rollouts(journal); got != want || get(t, moed).Status.PlanDigest != first.Status.PlanDigest {
				t.Errorf("%d workloads were created, want %d", got, want)
			}
			chosen := overlapEvents(t, namespace)
			if len(chosen) != 1+want-before {
				t.Errorf("events %q, want %d", chosen, 1+want-before)
			}
			t.Logf("%v tokens: %s %s; %v tokens: %s %s; events %q", large.BatchTokens, large.Reason, large.Message, small.BatchTokens, small.Reason, small.Message, chosen)
		})
	}
}

// waitOneRevision waits until a plan is rolled out, and all replicas are of one revision. Degraded may be True: a warning
// about the small model's embeddings applies to SGLang.
func waitOneRevision(t *testing.T, moed *semmoev1.MoEDeployment) *semmoev1.MoEDeployment {
	t.Helper()
	var current *semmoev1.MoEDeployment
	eventually(t, waitTimeout, "all replicas are of one revision", func() error {
		current = get(t, moed)
		if n := len(listWorkloads(t, moed)); n != 1 || current.Status.UpdatedReplicas != *moed.Spec.Replicas {
			return fmt.Errorf("%d workloads, status %+v", n, current.Status)
		}
		return errors.Join(conditionIs(current.Status.Conditions, current.Generation, semmoev1.ConditionRolledOut, metav1.ConditionTrue, "RolledOut"),
			conditionIs(current.Status.Conditions, current.Generation, semmoev1.ConditionReady, metav1.ConditionTrue, "Serving"))
	})
	return current
}

// slowHardware returns a hardware profile on which products and exchanges of a model this small take much longer than
// their start.
func slowHardware(t *testing.T, namespace string) *corev1.ConfigMap {
	t.Helper()
	machines := *hardware.DefaultProfile()
	machines.Name, machines.AllToAll.PerMicrosecond, machines.Grouped.FlopsPerMicrosecond, machines.Dense.FlopsPerMicrosecond = "slow", 500, 1e5, 1e5
	text, err := json.Marshal(machines)
	if err != nil {
		t.Fatal(err)
	}
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "slow"}, Data: map[string]string{"hardware.json": string(text)}}
}

// waitOverlap waits until the settings are chosen for other batch sizes than the given ones.
func waitOverlap(t *testing.T, moed *semmoev1.MoEDeployment, than []int32, reasons ...string) *semmoev1.OverlapStatus {
	t.Helper()
	var found *semmoev1.OverlapStatus
	eventually(t, waitTimeout, "overlap settings are chosen", func() error {
		if found = get(t, moed).Status.Overlap; found == nil || !slices.Contains(reasons, found.Reason) || slices.Equal(found.BatchTokens, than) {
			return fmt.Errorf("status.overlap is %+v", found)
		}
		return nil
	})
	return found
}

// waitHeldBatches waits until the status reports batch sizes that need another plan, which waits for the cool-down.
func waitHeldBatches(t *testing.T, moed *semmoev1.MoEDeployment, nudge func()) {
	t.Helper()
	eventually(t, waitTimeout, "other batch sizes wait for the cool-down", func() error {
		nudge()
		if batches := get(t, moed).Status.BatchTokens; batches == nil || !strings.HasSuffix(batches.Reason, "Cooldown") {
			return fmt.Errorf("status.batchTokens is %+v", batches)
		}
		return nil
	})
}

// checkOverlapFlags requires that all engines, or none of them, are started with the given flags.
func checkOverlapFlags(t *testing.T, moed *semmoev1.MoEDeployment, flags []string, set bool) {
	t.Helper()
	pods := slices.DeleteFunc(listEnginePods(t, moed), func(pod corev1.Pod) bool { return pod.DeletionTimestamp != nil })
	if len(pods) != 2 {
		t.Errorf("%d engine pods, want 2", len(pods))
	}
	for _, pod := range pods {
		for _, flag := range flags {
			if args := pod.Spec.Containers[0].Args; slices.ContainsFunc(args, func(arg string) bool { return strings.HasPrefix(arg, flag) }) != set {
				t.Errorf("the engine of pod %s is started with %v; flag %s is wanted: %t", pod.Name, args, flag, set)
			}
		}
	}
}

// rollouts returns the number of workloads that were created.
func rollouts(journal *faults.Journal) int {
	return journal.Created(func(object string) bool { return strings.HasPrefix(object, "StatefulSet ") })
}

// overlapEvents returns the messages of the events of chosen overlap settings.
func overlapEvents(t *testing.T, namespace string) (messages []string) {
	t.Helper()
	var events eventsv1.EventList
	if err := api.List(t.Context(), &events, client.InNamespace(namespace)); err != nil {
		t.Fatal(err)
	}
	for _, event := range events.Items {
		if event.Reason == "OverlapChosen" {
			messages = append(messages, event.Note)
		}
	}
	return messages
}

// checkOverlapRefused requires that the webhooks refuse overlap settings that an engine does not support, with the field
// and the reason.
func checkOverlapRefused(t *testing.T, namespace string) {
	t.Helper()
	for name, tc := range map[string]struct {
		engine  semmoev1.EngineType
		args    []string
		overlap semmoev1.OverlapSpec
		change  func(*semmoev1.MoEDeployment)
		want    []string
	}{
		"no exchange":            {engine: semmoev1.EngineSGLang, overlap: semmoev1.OverlapSpec{Mode: semmoev1.OverlapAuto}, want: []string{"spec.engine.overlap", "--moe-a2a-backend"}},
		"another backend":        {engine: semmoev1.EngineVLLM, args: []string{"--all2all-backend", "allgather_reducescatter"}, overlap: semmoev1.OverlapSpec{Mode: semmoev1.OverlapAuto}, want: []string{"spec.engine.overlap", "--all2all-backend", "deepep_low_latency"}},
		"no flags":               {engine: semmoev1.EngineVLLMAscend, overlap: semmoev1.OverlapSpec{Mode: semmoev1.OverlapAuto}, want: []string{"spec.engine.overlap", "VLLMAscend has no flag"}},
		"attention tp":           {engine: semmoev1.EngineVLLM, args: []string{"--all2all-backend", "deepep_low_latency"}, overlap: semmoev1.OverlapSpec{Mode: semmoev1.OverlapAuto}, change: func(m *semmoev1.MoEDeployment) { m.Spec.Parallelism.Attention = semmoev1.AttentionTensorParallel }, want: []string{"spec.engine.overlap", "TensorParallel"}},
		"a flag of both":         {engine: semmoev1.EngineVLLM, args: []string{"--all2all-backend", "deepep_low_latency", "--enable-dbo"}, overlap: semmoev1.OverlapSpec{MicroBatches: 2}, want: []string{"--enable-dbo", "spec.engine.overlap"}},
		"a member of another":    {engine: semmoev1.EngineSGLang, args: []string{"--moe-a2a-backend", "deepep"}, overlap: semmoev1.OverlapSpec{MicroBatches: 2, DecodeThresholdTokens: 64}, want: []string{"spec.engine.overlap.decodeThresholdTokens", "SGLang has no flag"}},
		"no plan":                {engine: semmoev1.EngineSGLang, args: []string{"--moe-a2a-backend", "deepep"}, overlap: semmoev1.OverlapSpec{Mode: semmoev1.OverlapAuto}, change: func(m *semmoev1.MoEDeployment) { m.Spec.Profiling = nil }, want: []string{"spec.engine.overlap.mode", "mode Auto needs a plan"}},
		"both modes":             {engine: semmoev1.EngineSGLang, args: []string{"--moe-a2a-backend", "deepep"}, overlap: semmoev1.OverlapSpec{Mode: semmoev1.OverlapAuto, MicroBatches: 2}, want: []string{"spec.engine.overlap.mode", "chooses all other members"}},
		"multiprocessors of one": {engine: semmoev1.EngineSGLang, args: []string{"--moe-a2a-backend", "deepep", "--deepep-mode", "low_latency"}, overlap: semmoev1.OverlapSpec{CommunicationSMs: 16}, want: []string{"spec.engine.overlap.communicationSMs", "low_latency"}},
	} {
		moed := storyDeployment(namespace, func(m *semmoev1.MoEDeployment) {
			m.Spec.Engine.Type, m.Spec.Engine.Args, m.Spec.Engine.Overlap = tc.engine, tc.args, &tc.overlap
			m.Spec.Routing.SamplePercent = nil
			if tc.change != nil {
				tc.change(m)
			}
		})
		err := api.Create(t.Context(), moed, client.DryRunAll)
		if err == nil {
			t.Errorf("%s: accepted", name)
			continue
		}
		for _, part := range tc.want {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%s: the error %q lacks %q", name, err, part)
			}
		}
	}
}
