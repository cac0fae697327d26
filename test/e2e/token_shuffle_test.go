// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"slices"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/corpus"
	"github.com/semmoe/operator/test/tier"
)

// TestTokenShuffle serves with attention over all ranks. An engine that shuffles tokens gets the tables of its plan, which
// the pods fetch from the store. The engines report that they use the tables, and count the local activation rate that
// the plan promises, which the status shows. Answers do not change. An engine without token shuffling gets a plan with
// few messages, and the status does not claim a higher locality.
func TestTokenShuffle(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	create(t, dataset(t, namespace, 8))
	moed := profiledDeployment(namespace, func(m *semmoev1.MoEDeployment) {
		shufflesTokens(m, 120)
		m.Spec.Drift.WindowSeconds = 60
	})
	create(t, moed)
	url := serviceURL(t, moed)
	traffic := requestsOf("c", "chinese", "english", "python", "sql")
	before := continuations(t, url, traffic[:5])
	planned := waitPlanned(t, moed)
	waitCondition(t, moed, semmoev1.ConditionRolledOut, metav1.ConditionTrue, "RolledOut", "2 of 2 pods received the tables")
	waitConditionWithin(t, 3*time.Minute, moed, semmoev1.ConditionRolledOut, metav1.ConditionTrue, "RolledOut", "2 use the tables of plan "+planned.Status.PlanDigest)
	if after := continuations(t, url, traffic[:5]); !slices.Equal(before, after) {
		t.Errorf("answers under the plan differ: %q, without %q", after, before)
	}

	var lar *semmoev1.LARStatus
	eventually(t, 6*time.Minute, "the engines' counters are reported", func() error {
		sendRequests(t, url, traffic)
		current := get(t, moed)
		if lar = current.Status.LAR; lar == nil || lar.ObservedMilli == nil {
			return fmt.Errorf("no rate in the status %+v", lar)
		}
		return conditionIs(current.Status.Conditions, current.Generation, semmoev1.ConditionLocalityOnTarget, metav1.ConditionTrue, "OnTarget")
	})
	observed, promised, counted := float64(*lar.ObservedMilli), float64(*lar.PredictedMilli), 1000*localRate(t, namespace, client.MatchingLabels{semmoev1.LabelComponent: semmoev1.ComponentEngine})
	t.Logf("thousandths: observed %v, promised %v, counted by the engines since their start %v", observed, promised, counted)
	if lar.Source != semmoev1.LARSourceEngine || math.Abs(observed/promised-1) > 0.1 || math.Abs(observed/counted-1) > 0.1 {
		t.Errorf("observed %+v; promised %v, the engines count %v", lar, promised, counted)
	}
	for _, pod := range listEnginePods(t, moed) {
		engine := pod.Spec.Containers[slices.IndexFunc(pod.Spec.Containers, func(c corev1.Container) bool { return c.Name == semmoev1.EngineContainer })]
		if !slices.ContainsFunc(engine.Env, func(v corev1.EnvVar) bool {
			return v.Name == semmoev1.PlanDigestVariable && v.Value == pod.Annotations[semmoev1.AnnotationPlanDigest] && v.Value != ""
		}) {
			t.Errorf("pod %s: the engine's environment lacks the plan: %+v", pod.Name, engine.Env)
		}
	}

	update(t, moed, func(m *semmoev1.MoEDeployment) { m.Spec.Placement.TokenShuffle = semmoev1.TokenShuffleDisabled })
	waitCondition(t, moed, semmoev1.ConditionLocalityOnTarget, metav1.ConditionUnknown, "TokenShuffleUnsupported", "one activation in 4 is local")
	eventually(t, waitTimeout, "a new plan is made", func() error {
		if plan := get(t, moed).Status.Plan; plan == planned.Status.Plan || plan == "" {
			return fmt.Errorf("the plan is %q", plan)
		}
		return nil
	})
}

// shufflesTokens sets attention over all ranks, an engine that shuffles tokens by the tables of a plan, and the number of
// requests to profile.
func shufflesTokens(m *semmoev1.MoEDeployment, requests int32) {
	m.Spec.Parallelism.Attention = semmoev1.AttentionTensorParallel
	m.Spec.Engine.Args = append(m.Spec.Engine.Args, "--moe-a2a-backend", "deepep")
	m.Spec.Routing.SamplePercent = nil // requests have no rank
	m.Spec.Placement.TokenShuffle = semmoev1.TokenShuffleEnabled
	m.Spec.Profiling.SamplingSpec = semmoev1.SamplingSpec{Requests: requests, Tokens: 100 * requests, RequestTokens: 128}
}

// sendRequests sends requests, 16 at a time.
func sendRequests(t *testing.T, url string, requests []corpus.Request) {
	t.Helper()
	for part := range slices.Chunk(requests, 16) {
		var clients errgroup.Group
		for _, request := range part {
			clients.Go(func() error {
				_, err := continuation(t, url, request.Text)
				return err
			})
		}
		if err := clients.Wait(); err != nil {
			t.Fatal(err)
		}
	}
}

// continuations returns the greedy continuations of requests, as soon as the deployment answers.
func continuations(t *testing.T, url string, requests []corpus.Request) (texts []string) {
	t.Helper()
	for _, request := range requests {
		eventually(t, waitTimeout, "a request is answered", func() error {
			text, err := continuation(t, url, request.Text)
			if err == nil {
				texts = append(texts, text)
			}
			return err
		})
	}
	return texts
}

// continuation returns the greedy continuation of a prompt.
func continuation(t *testing.T, url, prompt string) (string, error) {
	body, err := json.Marshal(map[string]any{"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0})
	if err != nil {
		return "", err
	}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	var answer struct {
		Choices []struct{ Text string }
	}
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil || len(answer.Choices) != 1 {
		return "", fmt.Errorf("%s: %d choices, %w", response.Status, len(answer.Choices), err)
	}
	return answer.Choices[0].Text, nil
}
