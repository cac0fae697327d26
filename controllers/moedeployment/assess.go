package moedeployment

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/lar"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/promquery"
	"github.com/semmoe/operator/solver/drift"
)

// assess gathers what there is to know of drift from what serves under a layout, and assesses it. promise is the layout's plan, plans
// are those of the MoEDeployment.
func (r *Reconciler) assess(ctx context.Context, moed *semmoev1.MoEDeployment, serving *layout, promise *semmoev1.PlacementPlan, plans []*semmoev1.PlacementPlan,
	reports []lar.Report, workloads []*workload, now time.Time) assessment {
	in := driftInput{
		Now: now, Spec: moed.Spec.Drift, Serving: serving, Plan: promise,
		Engine: moed.Spec.Engine.Type, EngineTells: engineTells(moed), Observed: observes(moed), WasBelow: wasBelow(moed),
		Paused: paused(moed), Pinned: moed.Spec.Placement.PlanRef != nil, RollingOut: rollingOut(workloads), Replans: replansOf(moed, plans),
	}
	if moed.Spec.Parallelism.Attention != semmoev1.AttentionDataParallel {
		in.Ranks, in.Shuffled = moed.Spec.Parallelism.ExpertParallelSize, shuffles(moed)
	}
	if serving == nil {
		return assessDrift(in)
	}
	window := time.Duration(moed.Spec.Drift.WindowSeconds) * time.Second
	in.Routers = evidenceOf(reports, serving.Digest, now, window)
	in.Rate = rateUnder(reports, serving.Digest)
	if newer := planWithDigest(in.Routers.Tables, plans); newer != nil {
		in.Plan = newer
	}
	if in.Plan != nil {
		in.Promise = in.Plan.Status.Forecast
	}
	if in.Promise == nil && promise != nil {
		in.Promise = promise.Status.Forecast
	}
	switch {
	case in.Plan == nil:
	case moed.Spec.Drift.Source == semmoev1.DriftSourcePrometheus:
		in.Prometheus = r.askPrometheus(ctx, moed, inUseSince(in.Plan, serving, workloads), now)
	case in.Routers.Tables == in.Plan.Status.PlanDigest:
		in.Routers.Calibration = r.calibrationOf(ctx, in.Plan)
	}
	return assessDrift(in)
}

// wasBelow reads from the previous status whether the rate was reported below the promise: it only keeps the report from coming and
// going.
func wasBelow(moed *semmoev1.MoEDeployment) bool {
	condition := meta.FindStatusCondition(moed.Status.Conditions, semmoev1.ConditionLocalityOnTarget)
	return condition != nil && condition.Reason == string(localityBelowPromise)
}

// rollingOut reports whether replicas are asked of several revisions, or of one on trial.
func rollingOut(workloads []*workload) bool {
	asked := slices.DeleteFunc(slices.Clone(workloads), func(w *workload) bool { return *w.replicas() == 0 })
	return len(asked) > 1 || slices.ContainsFunc(asked, onTrial)
}

// replansOf are the times at which plans were made for drift, the newest first. They are counted from the plans themselves: a status
// that is lost must not cost another plan.
func replansOf(moed *semmoev1.MoEDeployment, plans []*semmoev1.PlacementPlan) []time.Time {
	var made []time.Time
	for _, p := range plans {
		if p.Spec.Current != nil && metav1.IsControlledBy(p, moed) {
			made = append(made, p.CreationTimestamp.Time)
		}
	}
	slices.SortFunc(made, func(a, b time.Time) int { return b.Compare(a) })
	return made
}

// inUseSince is the earliest time at which a plan can have been in use: it and its workload must have been made.
func inUseSince(inUse *semmoev1.PlacementPlan, serving *layout, workloads []*workload) time.Time {
	since := inUse.CreationTimestamp.Time
	for _, w := range workloads { // the newest first
		if w.template().Annotations[semmoev1.AnnotationPlanDigest] == serving.Digest && w.CreationTimestamp.After(since) {
			since = w.CreationTimestamp.Time
		}
	}
	return since
}

// rateUnder is the rate of the last requests that routers sampled under a layout.
func rateUnder(reports []lar.Report, layoutDigest string) lar.Ratio {
	var rate lar.Ratio
	for _, report := range reports {
		for key, sketch := range report.Last {
			if key.Plan == layoutDigest {
				rate.Merge(sketch.Overall)
			}
		}
	}
	return rate
}

// calibrationOf reads the calibration of a plan from its ConfigMap; nil where it has none, or one that is not the plan's.
func (r *Reconciler) calibrationOf(ctx context.Context, p *semmoev1.PlacementPlan) *drift.Calibration {
	log := logr.FromContextOrDiscard(ctx).WithValues("plan", p.Name)
	held := &corev1.ConfigMap{}
	if err := r.Get(ctx, client.ObjectKey{Namespace: p.Namespace, Name: p.Status.ConfigMap}, held); err != nil {
		log.V(1).Info("Cannot read the calibration of a plan", "reason", err.Error())
		return nil
	}
	calibration, err := calibrationIn(held.Data, p.Status.PlanDigest)
	if err != nil {
		log.Error(err, "The calibration of a plan is of no use", "configMap", held.Name)
		return nil
	}
	return calibration
}

// calibrationIn is the calibration in the ConfigMap of a plan with that digest, verified by the plan's manifest; nil where the plan
// has none.
func calibrationIn(data map[string]string, planDigest string) (*drift.Calibration, error) {
	text, has := data[plan.DriftFile]
	if !has {
		return nil, nil
	}
	if err := checkSum(plan.ManifestFile, data[plan.ManifestFile], planDigest); err != nil {
		return nil, err
	}
	var manifest plan.Manifest
	if err := json.Unmarshal([]byte(data[plan.ManifestFile]), &manifest); err != nil {
		return nil, fmt.Errorf("%s: %w", plan.ManifestFile, err)
	}
	if err := checkSum(plan.DriftFile, text, manifest.Files[plan.DriftFile]); err != nil {
		return nil, err
	}
	calibration := &drift.Calibration{}
	if err := json.Unmarshal([]byte(text), calibration); err != nil {
		return nil, fmt.Errorf("%s: %w", plan.DriftFile, err)
	}
	if err := calibration.Validate(); err != nil {
		return nil, fmt.Errorf("%s: %w", plan.DriftFile, err)
	}
	return calibration, nil
}

// checkSum refuses content that has not the sha256 that is wanted.
func checkSum(name, content, want string) error {
	sum := sha256.Sum256([]byte(content))
	if got := hex.EncodeToString(sum[:]); got != want {
		return fmt.Errorf("%s is damaged: its sha256 is %s, want %s", name, got, want)
	}
	return nil
}

// tokenKey is the key of a Secret with a bearer token.
const tokenKey = "token"

// askPrometheus asks for the values of the last two windows, as far back as the plan is in use.
func (r *Reconciler) askPrometheus(ctx context.Context, moed *semmoev1.MoEDeployment, since, now time.Time) prometheusEvidence {
	source := moed.Spec.Drift.Prometheus
	evidence := prometheusEvidence{Window: time.Duration(moed.Spec.Drift.WindowSeconds) * time.Second}
	step := evidence.step()
	evidence.End = now.Truncate(step)
	token, problem := r.prometheusToken(ctx, moed)
	if problem.reason != "" {
		evidence.Problem = problem
		return evidence
	}
	points, err := r.Prometheus.Range(ctx, promquery.Query{
		Address: source.Address, Token: token, Expression: source.Query,
		Start: evidence.End.Add(step - 2*evidence.Window), End: evidence.End, Step: step,
	})
	if told := (*promquery.Error)(nil); errors.As(err, &told) {
		logr.FromContextOrDiscard(ctx).V(1).Info("Prometheus does not tell the local activation rate", "reason", told.Message, "cause", fmt.Sprint(told.Cause))
		evidence.Problem = finding{told.Reason, told.Message}
		return evidence
	}
	evidence.Points = numbers(points, since)
	return evidence
}

// prometheusToken reads the bearer token; empty where none is asked for. The operator has no right to read Secrets by itself: whoever
// names one grants it to read that one.
func (r *Reconciler) prometheusToken(ctx context.Context, moed *semmoev1.MoEDeployment) (string, finding) {
	name := moed.Spec.Drift.Prometheus.AuthSecret
	if name == "" {
		return "", finding{}
	}
	secret := &corev1.Secret{}
	err := r.Secrets.Get(ctx, client.ObjectKey{Namespace: moed.Namespace, Name: name}, secret)
	field := fmt.Sprintf("spec.drift.prometheus.authSecret: Secret %q", name)
	switch {
	case apierrors.IsNotFound(err):
		return "", finding{"SecretNotFound", field + " does not exist in this namespace: create it"}
	case apierrors.IsForbidden(err):
		return "", finding{"SecretForbidden", fmt.Sprintf("%s may not be read by the operator. Allow it with: kubectl create role semmoe-drift -n %[2]s --verb=get --resource=secrets --resource-name=%[3]s; kubectl create rolebinding semmoe-drift -n %[2]s --role=semmoe-drift --serviceaccount=%[4]s:semmoe-manager",
			field, moed.Namespace, name, cmp.Or(r.Namespace, "semmoe-system"))}
	case err != nil:
		logr.FromContextOrDiscard(ctx).V(1).Info("Cannot read the token for Prometheus", "secret", name, "reason", err.Error())
		return "", finding{"SecretUnreadable", field + " cannot be read now"}
	case len(secret.Data[tokenKey]) == 0:
		return "", finding{"SecretNotFound", fmt.Sprintf("%s has no key %q, or an empty one", field, tokenKey)}
	}
	return string(secret.Data[tokenKey]), finding{}
}

const (
	// driftSteps is the part of the threshold, or of the statistic, by which the reported statistic moves: status is not a metric,
	// and a statistic wanders about zero.
	driftSteps = 4
	// causeStep is the change, in thousandths, from which reported causes move.
	causeStep = 100
)

// driftStatus is the reported state of the test. Like the rate it stays at the previous report until it differs by a step and a minute
// has passed, but an alarm is told at once.
func driftStatus(previous *semmoev1.DriftStatus, a assessment, now time.Time) *semmoev1.DriftStatus {
	switch {
	case a.Status == "":
		return previous
	case !a.Tested:
		return nil
	}
	status := &semmoev1.DriftStatus{StatisticMilli: milliOf(a.Statistic), ThresholdMilli: milliOf(a.Threshold), ObservedTime: new(metav1.NewTime(now.Truncate(time.Second)))}
	if a.Status == localityDrifted {
		status.Since = new(metav1.NewTime(a.Since.Truncate(time.Second)))
		if a.Causes != nil {
			status.Causes = &semmoev1.DriftCauses{NewTokensMilli: milliOf(a.Causes.NewTokens), ChangedMixMilli: milliOf(a.Causes.Mix), LoadBalancingMilli: milliOf(a.Causes.Balance)}
		}
	}
	if previous == nil || (previous.Since == nil) != (status.Since == nil) || previous.ThresholdMilli != status.ThresholdMilli || previous.ObservedTime == nil {
		return status
	}
	// The samples in which a long drift began are forgotten at last; it has not begun anew.
	status.Since = previous.Since
	if now.Sub(previous.ObservedTime.Time) < observePeriod || !moved(previous, status) {
		return previous.DeepCopy()
	}
	return status
}

// moved tells that a report differs from the previous one by a step.
func moved(previous, status *semmoev1.DriftStatus) bool {
	far := func(a, b, step int32) bool { return max(a-b, b-a) >= step }
	if far(previous.StatisticMilli, status.StatisticMilli, max(status.ThresholdMilli, previous.StatisticMilli)/driftSteps) {
		return true
	}
	if previous.Causes == nil || status.Causes == nil {
		return previous.Causes != status.Causes
	}
	was, is := previous.Causes, status.Causes
	return far(was.NewTokensMilli, is.NewTokensMilli, causeStep) || far(was.ChangedMixMilli, is.ChangedMixMilli, causeStep) || far(was.LoadBalancingMilli, is.LoadBalancingMilli, causeStep)
}

// maxMilli keeps differences of thousandths within an int32.
const maxMilli = 1e9

func milliOf(value float64) int32 {
	return int32(math.Round(min(max(1000*value, 0), maxMilli)))
}

// localityVerdict is the condition LocalityOnTarget. Its figures are those of the status, which move by steps: else the condition would
// be written every minute.
func localityVerdict(a assessment, rate *semmoev1.LARStatus, test *semmoev1.DriftStatus) verdict {
	status := metav1.ConditionTrue
	switch a.Status {
	case "":
		return verdict{metav1.ConditionUnknown, "NotAssessed", "What is in service is not known yet"}
	case localityUnknown:
		return verdict{metav1.ConditionUnknown, a.Reason, a.Message}
	case localityBelowPromise, localityDrifted:
		status = metav1.ConditionFalse
	}
	text := a.Message + "."
	if rate != nil && rate.ObservedMilli != nil {
		text += fmt.Sprintf(" The observed local activation rate is %s, the plan promises %s.", percent(*rate.ObservedMilli), a.Promise.LARSummary)
	}
	if a.Status != localityDrifted {
		return verdict{status, a.Reason, text}
	}
	if test != nil && test.Causes != nil {
		text += " " + causesText(*test.Causes)
	}
	if a.Hold.reason != "" {
		text += fmt.Sprintf(" No plan is made for it now (%s): %s.", a.Hold.reason, a.Hold.message)
	}
	return verdict{status, a.Reason, text}
}

// causesText tells where a drop comes from.
func causesText(c semmoev1.DriftCauses) string {
	rest := max(0, 1000-c.NewTokensMilli-c.ChangedMixMilli-c.LoadBalancingMilli)
	return fmt.Sprintf("Of what is lost, %s comes with tokens that the plan has not seen, %s with another mix of requests, %s with spreading load, and %s with tokens that activate other experts than they did.",
		percent(c.NewTokensMilli), percent(c.ChangedMixMilli), percent(c.LoadBalancingMilli), percent(rest))
}
