// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/observation/lar"
)

// waitDrift returns a step that waits until the operator reports drift.
func (s *shift) waitDrift(ctx context.Context) func(update func(string)) error {
	return s.waitMoED(ctx, func(moed *semmoev1.MoEDeployment) (string, bool, error) {
		condition := meta.FindStatusCondition(moed.Status.Conditions, semmoev1.ConditionLocalityOnTarget)
		if condition == nil {
			return "no condition yet", false, nil
		}
		if condition.Status != metav1.ConditionFalse || condition.Reason != "Drifted" {
			return condition.Message, false, nil
		}
		if moed.Status.Drift == nil {
			return "", false, errors.New("condition LocalityOnTarget has reason Drifted, but status.drift is empty")
		}
		s.drift, s.why = *moed.Status.Drift, condition.Message
		return "", true, nil
	})
}

// waitReplan returns a step that waits until a plan to replace the current plan is solved.
func (s *shift) waitReplan(ctx context.Context) func(update func(string)) error {
	return s.waitMoED(ctx, func(moed *semmoev1.MoEDeployment) (string, bool, error) {
		var plans semmoev1.PlacementPlanList
		if err := s.read(ctx, &plans, "pplan"); err != nil {
			return "", false, err
		}
		for i := range plans.Items {
			plan := &plans.Items[i]
			if plan.Spec.Current == nil || plan.Status.Verdict == "" {
				continue
			}
			s.again = plan
			if plan.Status.Verdict != semmoev1.VerdictGain {
				return "", false, fmt.Errorf("PlacementPlan %s of the changed traffic is %s: %+v", plan.Name, plan.Status.Verdict, plan.Status.Comparison)
			}
			return "", true, nil
		}
		if planned := meta.FindStatusCondition(moed.Status.Conditions, semmoev1.ConditionPlanned); planned != nil {
			_, detail, _ := strings.Cut(planned.Message, ". ") // the rest describes the plan that is being solved
			return detail, false, nil
		}
		return "no condition yet", false, nil
	})
}

// waitInService returns a step that waits until all replicas serve a plan: its layout, or its tables with their base
// layout.
func (s *shift) waitInService(ctx context.Context, plan *semmoev1.PlacementPlan) func(update func(string)) error {
	return s.waitMoED(ctx, func(moed *semmoev1.MoEDeployment) (string, bool, error) {
		condition := meta.FindStatusCondition(moed.Status.Conditions, semmoev1.ConditionRolledOut)
		if condition == nil || condition.ObservedGeneration != moed.Generation {
			return "no condition yet", false, nil
		}
		if condition.Reason == "RolledBack" {
			return "", false, errors.New(condition.Message)
		}
		serves := moed.Status.PlanDigest == plan.Status.Plan
		if plan.Status.Tier == semmoev1.TierTables {
			serves = strings.Contains(condition.Message, plan.Name)
		}
		return condition.Message, serves && condition.Status == metav1.ConditionTrue, nil
	})
}

// waitUsed returns a step that waits until every request router scores requests by the tables of a plan.
func (s *shift) waitUsed(ctx context.Context, plan *semmoev1.PlacementPlan) func(update func(string)) error {
	layout := plan.Status.PlanDigest
	if plan.Status.Tier == semmoev1.TierTables {
		layout = plan.Spec.Current.PlanDigest
	}
	return func(update func(string)) error {
		return poll(ctx, update, func(ctx context.Context) (string, bool, error) {
			err := s.eachReport(ctx, func(report lar.Report) error {
				if used := report.Tables[layout]; used != plan.Status.PlanDigest {
					return fmt.Errorf("the tables in use are those of plan %q", used)
				}
				return nil
			})
			if err != nil {
				return err.Error(), false, nil
			}
			return "", true, nil
		})
	}
}

// waitRolledBack returns a step that waits until the bad plan is rolled back from all replicas.
func (s *shift) waitRolledBack(ctx context.Context) func(update func(string)) error {
	s.ready = true
	return s.waitMoED(ctx, func(moed *semmoev1.MoEDeployment) (string, bool, error) {
		s.ready = s.ready && meta.IsStatusConditionTrue(moed.Status.Conditions, semmoev1.ConditionReady)
		condition := meta.FindStatusCondition(moed.Status.Conditions, semmoev1.ConditionRolledOut)
		if condition == nil {
			return "no condition yet", false, nil
		}
		if moed.Status.PlanDigest == s.bad.Status.Plan {
			return "", false, fmt.Errorf("the bad plan %s is in service: %s", s.bad.Status.Plan, condition.Message)
		}
		back := condition.ObservedGeneration == moed.Generation && condition.Reason == "RolledBack" && moed.Status.Rollout == nil &&
			moed.Status.UpdatedReplicas == *moed.Spec.Replicas && moed.Status.ReadyReplicas == *moed.Spec.Replicas
		if back {
			s.failure, _, _ = strings.Cut(condition.Message, " It is not tried again")
		}
		return condition.Message, back, nil
	})
}
