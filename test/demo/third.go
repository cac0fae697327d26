// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	_ "embed"
	"fmt"
	"math"
	"os"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/locality"
	"github.com/semmoe/operator/test/corpus"
)

//go:embed tokens.yaml
var thirdManifest string

const (
	// thirdDeployment is the MoEDeployment of the third act, tokensDataset the ConfigMap with its data set.
	thirdDeployment = "tokens"
	tokensDataset   = "tokens"
	// promiseTolerance is the maximum relative difference of the observed rate from the promise of the tables, and from
	// the engines' counters.
	promiseTolerance = 0.1
)

// thirdAct serves a model with tensor-parallel attention: each token has a rank in each layer, by the tables of a plan.
// When the traffic changes, the operator must find the drift in the engines' counters and replace the tables.
func (d *demo) thirdAct(ctx context.Context, texts texts) ([]check, error) {
	s := &tokenAct{shift: &shift{demo: d, golden: texts.golden, prose: ofProse(texts.heldOut, true), code: ofProse(texts.heldOut, false)}}
	for _, part := range []func(context.Context, []corpus.Request) error{s.serveTokens, s.changeTokens} {
		if err := part(ctx, texts.train); err != nil {
			return nil, err
		}
	}
	checks := s.checks()
	s.print()
	printChecks(os.Stdout, checks)
	return checks, nil
}

// tokenAct is the state and the result of the third act.
type tokenAct struct {
	*shift
	// usual and recovered are the rates in the status before the change and with the new tables. counted are the engines'
	// counters with the new tables.
	usual, recovered semmoev1.LARStatus
	counted          activations
	// first are the answers with the first tables, answers (of shift) those with the new ones. started identifies the
	// containers of the engine pods with their restarts, before and after the change.
	first   []answer
	started [2]string
}

// serveTokens serves the model until the observed rate of prose is on target. Its distance to the promise is not checked:
// the promise is from a fifth of 95 requests, and is too uncertain.
func (s *tokenAct) serveTokens(ctx context.Context, train []corpus.Request) error {
	if err := s.applyDataset(ctx, tokensDataset, ofProse(train, true)); err != nil {
		return err
	}
	if err := s.serve(ctx, "tokens.yaml", thirdManifest); err != nil {
		return err
	}
	return s.duringWaves(ctx, s.prose, func() error {
		if err := s.out.Step(ctx, "plan for prose rolled out", s.waitCondition(ctx, semmoev1.ConditionRolledOut, s.profileProgress)); err != nil {
			return err
		}
		moed, err := s.get(ctx)
		if err != nil {
			return err
		}
		s.base = &semmoev1.PlacementPlan{}
		if err := s.read(ctx, s.base, "pplan", moed.Status.Plan); err != nil {
			return err
		}
		if err := s.out.Step(ctx, "plan's tables in the engines", s.waitTables(ctx, s.base)); err != nil {
			return err
		}
		if s.first, err = s.ask(ctx, s.golden); err != nil {
			return err
		}
		return s.out.Step(ctx, "rate of prose on target", s.waitRate(ctx, s.base, &s.usual))
	})
}

// changeTokens changes the traffic and the data set to code, until the observed rate is that of new tables.
func (s *tokenAct) changeTokens(ctx context.Context, train []corpus.Request) (err error) {
	if s.started[0], err = s.containers(ctx); err != nil {
		return err
	}
	if err := s.applyDataset(ctx, tokensDataset, ofProse(train, false)); err != nil {
		return err
	}
	return s.duringWaves(ctx, s.code, func() error {
		if err := s.out.Step(ctx, "drift reported by the operator", s.waitFallen(ctx)); err != nil {
			return err
		}
		if err := s.out.Step(ctx, "plan made for code", s.waitReplan(ctx)); err != nil {
			return err
		}
		if err := s.out.Step(ctx, "new tables in the engines", s.waitTables(ctx, s.again)); err != nil {
			return err
		}
		before, err := s.engineCounters(ctx)
		if err != nil {
			return err
		}
		if s.answers, err = s.ask(ctx, s.golden); err != nil {
			return err
		}
		if err := s.out.Step(ctx, "rate of code as promised", s.waitRate(ctx, s.again, &s.recovered)); err != nil {
			return err
		}
		after, err := s.engineCounters(ctx)
		if err != nil {
			return err
		}
		s.counted = after.minus(before)
		s.started[1], err = s.containers(ctx)
		return err
	})
}

// waitFallen returns a step that waits until the observed rate misses the promise.
func (s *tokenAct) waitFallen(ctx context.Context) func(update func(string)) error {
	return s.waitMoED(ctx, func(moed *semmoev1.MoEDeployment) (string, bool, error) {
		condition := meta.FindStatusCondition(moed.Status.Conditions, semmoev1.ConditionLocalityOnTarget)
		if condition == nil {
			return "no condition yet", false, nil
		}
		s.why = condition.Message
		return condition.Message, condition.Status == metav1.ConditionFalse, nil
	})
}

// waitTables returns a step that waits until every engine uses the tables of a plan.
func (s *tokenAct) waitTables(ctx context.Context, plan *semmoev1.PlacementPlan) func(update func(string)) error {
	want := fmt.Sprintf("plan_digest=%q", plan.Status.PlanDigest)
	return func(update func(string)) error {
		return poll(ctx, update, func(ctx context.Context) (string, bool, error) {
			err := s.eachPod(ctx, "engine", 30000, "metrics", func(metrics string) error {
				var used []string
				for sample := range samples(metrics, "semmoe_engine_tables_info") {
					if sample.value == 1 && sample.labels == want {
						return nil
					}
					used = append(used, sample.labels)
				}
				return fmt.Errorf("the tables in use are %v; want %s", used, want)
			})
			if err != nil {
				return err.Error(), false, nil
			}
			return "", true, nil
		})
	}
}

// waitRate returns a step that waits until the status has an observed rate under the promise of a plan that is on
// target. It stores the rate in into.
func (s *tokenAct) waitRate(ctx context.Context, plan *semmoev1.PlacementPlan, into *semmoev1.LARStatus) func(update func(string)) error {
	return s.waitMoED(ctx, func(moed *semmoev1.MoEDeployment) (string, bool, error) {
		condition := meta.FindStatusCondition(moed.Status.Conditions, semmoev1.ConditionLocalityOnTarget)
		rate := moed.Status.LAR
		switch {
		case condition == nil || rate == nil || rate.ObservedMilli == nil || rate.PredictedMilli == nil:
			return "no rate yet", false, nil
		case *rate.PredictedMilli != locality.PromiseAt(plan.Status.Forecast, moed.Status.BatchTokens).LARMilli:
			return "the promise is not yet that of PlacementPlan " + plan.Name, false, nil
		}
		*into = *rate
		return condition.Message, condition.Status == metav1.ConditionTrue && condition.Reason == "OnTarget", nil
	})
}

// engineCounters sums the activations that the engines have counted since they started.
func (s *tokenAct) engineCounters(ctx context.Context) (sum activations, err error) {
	return sum, s.eachPod(ctx, "engine", 30000, "metrics", func(metrics string) error {
		sum.add(metrics, "semmoe_engine_activations_total")
		return nil
	})
}

// containers identifies the engine pods, and the restarts of their containers.
func (s *tokenAct) containers(ctx context.Context) (string, error) {
	return s.cluster.run(ctx, nil, "get", "pods", "-n", namespace, "-l", "semmoe.io/deployment="+s.name+",semmoe.io/component=engine", "--sort-by=.metadata.uid",
		"-o", `go-template={{range .items}}{{.metadata.uid}}{{range .status.containerStatuses}} {{.name}} {{.restartCount}}{{end}};{{end}}`)
}

// checks returns the checks of the third act.
func (s *tokenAct) checks() []check {
	agrees := func(name string, observed, wanted float64) check {
		return check{name, math.Abs(observed/wanted-1) <= promiseTolerance, fmt.Sprintf("%.1f%%, and %.1f%%; the tolerance is %.0f%%", 100*observed, 100*wanted, 100*promiseTolerance)}
	}
	rates := func(r semmoev1.LARStatus) (observed, promised float64) {
		return float64(*r.ObservedMilli) / 1000, float64(*r.PredictedMilli) / 1000
	}
	usual, usualPromise := rates(s.usual)
	recovered, promise := rates(s.recovered)
	changed := 0
	for i := range s.answers {
		if s.answers[i].text != s.first[i].text {
			changed++
		}
	}
	return append([]check{
		{"only the tables changed", s.again.Status.Tier == semmoev1.TierTables, fmt.Sprintf("tier %s of plan %s", s.again.Status.Tier, s.again.Status.Plan)},
		agrees("prose is served as the plan promises", usual, usualPromise),
		agrees("code is served as the new tables promise", recovered, promise),
		agrees("status and engines' counters agree", recovered, s.counted.lar()),
		{"no container was restarted", s.started[0] == s.started[1] && s.started[0] != "", fmt.Sprintf("%d engine pods", strings.Count(s.started[1], ";"))},
		{"the new tables change no answer", changed == 0 && len(s.answers) > 0, fmt.Sprintf("%d of %d answers differ", changed, len(s.answers))},
	}, checkAnswers(s.answers)...)
}

// print prints the operator's messages on the change and on the new tables.
func (s *tokenAct) print() {
	fmt.Printf("\nForecast of the tables: %s\nProse: %.1f%% of the activations are local; promised are %.1f%%\nThe change: %s\nThe new tables: %s\n", s.base.Status.Forecast.Method,
		float64(*s.usual.ObservedMilli)/10, float64(*s.usual.PredictedMilli)/10, s.why, s.again.Status.Comparison.Reason)
}
