// SPDX-License-Identifier: Apache-2.0

package moedeployment

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	leaderworkersetv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	semmoeac "github.com/semmoe/operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/decision"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/download"
	"github.com/semmoe/operator/controllers/moedeployment/front"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/kube/conditionevents"
	"github.com/semmoe/operator/internal/kube/conditions"
	"github.com/semmoe/operator/internal/kube/podhealth"
	"github.com/semmoe/operator/internal/kube/printable"
	"github.com/semmoe/operator/internal/profile/inspection"
	"github.com/semmoe/operator/internal/rollout"
)

// observation contains everything that the status is computed from.
type observation struct {
	// Decision is what the MoEDeployment needs, and the traffic that it was decided from.
	decision.Decision
	// Enough reports whether the observed traffic suffices. RankTokens is the number of sampled tokens per rank.
	Enough     bool
	RankTokens map[int]int64

	// Download is the state of the model's download.
	Download download.State
	// Inspection is the state of the model's inspection.
	Inspection inspection.State
	// Pods are the engine pods that serve requests; Workers are the other pods of their replicas.
	Pods, Workers []*corev1.Pod
	// Router is the Deployment of the request router, or nil.
	Router *appsv1.Deployment
	// StoreFailure is why the artifact store does not answer; empty if it does, or if no plan is needed.
	StoreFailure string

	// Settled reports whether all desired replicas are of Revision.
	Settled bool
	// Rollout is the state of the candidate, or of a failed candidate that is rolling back.
	Rollout decision.RolloutState
	// Front reports what prevents requests from reaching the engines or their ranks.
	Front front.State
	// Served is the layout of the serving workload; nil for none.
	Served *revisions.Layout

	// Problem is what prevents an engine pod from serving, or an inspection pod from running.
	Problem *podhealth.Problem
	// RouterProblem is what prevents a request router pod from serving.
	RouterProblem *podhealth.Problem
	// Failure is an error of a phase of the reconciliation that a retry does not fix.
	Failure string
}

// observationOf returns what is known after a decision.
func observationOf(s *decision.Snapshot, d decision.Decision) observation {
	var served *revisions.Layout
	for _, workload := range s.Workloads {
		if workload.Labels[semmoev1.LabelRevision] == d.ServingRevision() {
			served = planner.LayoutIn(workload)
		}
	}
	return observation{
		Decision: d, Served: served, Enough: d.Observed.Enough(), RankTokens: d.Observed.RankLoads(),
		Download: s.Download, Inspection: s.Inspection, Pods: s.Pods, Workers: s.Workers, Router: s.Router, StoreFailure: s.StoreFailure,
	}
}

// unplanned reports whether the plan for the spec is unknown, because the spec is invalid or the model is not inspected
// yet.
func (o observation) unplanned() bool {
	return o.Invalid != nil || o.Inspection.Report == nil
}

// described returns the planning state that the status describes: that of the spec, or that of the serving workload
// while the former is unknown.
func (o observation) described() planner.Planning {
	if o.unplanned() {
		return o.ServingPlanning()
	}
	return o.Planning
}

// nameInStatus returns the name of a profile or plan for the status, or "" if the name exceeds 63 characters. Only
// user-provided names do, and the spec contains them. A truncated name could match another object.
func nameInStatus(name string) string {
	if len(name) > 63 {
		return ""
	}
	return name
}

// statusOf computes the status from an observation. It uses the previous status only to keep transition times, and to
// distinguish work for a new generation from repair.
func statusOf(moed *semmoev1.MoEDeployment, o observation, now time.Time) semmoev1.MoEDeploymentStatus {
	if o.Undecided {
		o.Revision = moed.Status.Revision
	}
	status := semmoev1.MoEDeploymentStatus{
		Conditions:         append([]metav1.Condition(nil), moed.Status.Conditions...),
		ObservedGeneration: moed.Generation,
		Selector:           labels.SelectorFromSet(desired.Selector(moed, semmoev1.ComponentEngine)).String(),
		Model:              o.Inspection.Model(),
		Download:           o.Download.Status(moed.Status.Download),
		Revision:           o.Revision,
		Profile:            nameInStatus(o.described().ProfileName),
		PlanDigest:         shortDigest(o.ServingPlanning().Serving),
		PendingPlan:        pendingPlan(o),
		Rollout:            rolloutStatus(moed.Status.Rollout, o, now),
		LAR:                larStatus(moed.Status.LAR, moed.Status.BatchTokens, o, desired.Observes(moed) || desired.ObservesTokens(moed), now),
		Drift:              driftStatus(moed.Status.Drift, o.Drift, now),
		Routing:            captureStatus(routingStatus(moed.Status.Routing, o, cmp.Or(o.Ranks, moed.Spec.Parallelism.ExpertParallelSize), desired.Observes(moed), now), moed.Status.Routing, o, desired.Observes(moed), now),
	}
	if o.Front.ServiceTaken == "" {
		scheme := "http"
		if moed.Spec.Routing.TLS != nil {
			scheme = "https"
		}
		status.Endpoint = fmt.Sprintf("%s://%s.%s.svc:%d", scheme, moed.Name, moed.Namespace, semmoev1.ServicePort)
	}
	if revision := o.ServingRevision(); revision != "" {
		status.Serving = &semmoev1.ServingStatus{Revision: revision, Ranks: o.Ranks, EngineRelease: o.Release.String()}
	}
	if plan := cmp.Or(o.described().Plan, o.described().Promise); plan != nil {
		status.Plan = nameInStatus(plan.Name)
	}
	status.Overlap = overlapStatus(moed, o)
	status.BatchTokens = batchTokensStatus(moed.Status.BatchTokens, moed, cmp.Or(o.described().Plan, o.described().Promise), o, now)
	if o.Undecided {
		status.BatchTokens, status.Overlap = moed.Status.BatchTokens, moed.Status.Overlap
		status.Profile, status.Plan, status.PlanDigest, status.Rollout, status.LAR = moed.Status.Profile, moed.Status.Plan, moed.Status.PlanDigest, moed.Status.Rollout, moed.Status.LAR
		status.PendingPlan = moed.Status.PendingPlan
		status.Serving = moed.Status.Serving
	}
	for _, pod := range o.Pods {
		if pod.DeletionTimestamp != nil {
			continue
		}
		status.Replicas++
		if !podhealth.Ready(pod) {
			continue
		}
		status.ReadyReplicas++
		if pod.Labels[semmoev1.LabelRevision] == o.Revision {
			status.UpdatedReplicas++
		}
	}
	status.Summary = fmt.Sprintf("%d/%d", status.ReadyReplicas, *moed.Spec.Replicas)
	status.Reshuffle = reshuffleStatus(o.Pods, o.ServingRevision())
	set := func(kind string, v conditions.Verdict) {
		conditions.Set(&status.Conditions, kind, v, moed.Generation, now)
	}
	// While the decision is unknown, keep conditions of the same generation.
	setDecided := func(kind string, v conditions.Verdict, oldest int64) {
		if current := meta.FindStatusCondition(status.Conditions, kind); !o.Undecided || current == nil || current.ObservedGeneration < oldest {
			set(kind, v)
		}
	}
	fault := faultOf(moed, o)
	stalled := fault != nil && fault.Stalls || o.Rollout.Held
	complete := o.Settled && status.UpdatedReplicas == *moed.Spec.Replicas && status.Replicas == *moed.Spec.Replicas
	set(semmoev1.ConditionReady, readyVerdict(moed, o, status, fault))
	setDecided(semmoev1.ConditionProgressing, progressingVerdict(moed, o, status, complete, stalled), moed.Generation)
	if degraded := cmp.Or(fault, tiedFault(moed, o), ranksFault(o)); degraded != nil { // ignored ranks or embeddings do not affect readiness
		set(semmoev1.ConditionDegraded, conditions.Degraded(degraded))
	} else {
		setDecided(semmoev1.ConditionDegraded, conditions.Degraded(nil), moed.Generation)
	}
	setDecided(semmoev1.ConditionStalled, stalledVerdict(fault, o.Rollout), moed.Generation)
	setDecided(semmoev1.ConditionReconciling, reconcilingVerdict(moed, o, status, complete, stalled), moed.Generation)
	setDecided(semmoev1.ConditionProfiled, profiledVerdict(moed, o), 0)
	setDecided(semmoev1.ConditionPlanned, plannedVerdict(moed, o), 0)
	setDecided(semmoev1.ConditionRolledOut, rolledOutVerdict(moed, o, complete), 0)
	if o.Drift.Status != "" || meta.FindStatusCondition(status.Conditions, semmoev1.ConditionLocalityOnTarget) == nil {
		set(semmoev1.ConditionLocalityOnTarget, localityVerdict(o.Drift, status.LAR, status.Drift))
	}
	return status
}

// pendingPlan returns the short digest of the plan that waits for approval: to start its roll-out, to end an
// inconclusive canary, or to use its tables. For an inconclusive canary of a change it is the revision. It is "" if none
// waits.
func pendingPlan(o observation) string {
	if o.Rollout.Reason == rollout.ReasonInconclusive {
		if o.Change != nil {
			return o.Rollout.Candidate
		}
		return o.Rollout.Plan
	}
	return cmp.Or(o.Planning.Hold.Pending, o.Planning.TablesHold.Pending, o.Planning.Overlap.Why.Pending)
}

func shortDigest(serving *revisions.Layout) string {
	if serving == nil {
		return ""
	}
	return serving.Short()
}

// reasonDownloading and reasonDownloadFailed are the reasons of a model that is being downloaded, and of one whose download
// failed.
const (
	reasonDownloading    = "Downloading"
	reasonDownloadFailed = "DownloadFailed"
)

// reasonReconcileFailed is the reason of objects that cannot be written.
const reasonReconcileFailed = "ReconcileFailed"

func faultOf(moed *semmoev1.MoEDeployment, o observation) *conditions.Fault {
	switch {
	case o.Invalid != nil:
		return &conditions.Fault{Reason: o.Invalid.Reason, Message: o.Invalid.Message, Stalls: true}
	case o.Download.Failure != "" && o.Download.Invalid:
		return &conditions.Fault{Reason: reasonDownloadFailed, Message: o.Download.Failure, Stalls: true}
	case o.Download.Failure != "":
		return &conditions.Fault{Reason: reasonDownloadFailed, Message: "The download of the model failed and resumes: " + o.Download.Failure}
	case o.Inspection.Failure != "" && o.Inspection.Invalid:
		return &conditions.Fault{Reason: "ModelInvalid", Message: o.Inspection.Failure, Stalls: true}
	case o.Inspection.Failure != "":
		return &conditions.Fault{Reason: "InspectionFailed", Message: "The inspection of the model failed and will be retried: " + o.Inspection.Failure}
	case o.Problem != nil:
		return &conditions.Fault{Reason: o.Problem.Reason, Message: o.Problem.Message}
	case o.RouterProblem != nil && routed(moed):
		return &conditions.Fault{Reason: o.RouterProblem.Reason, Message: o.RouterProblem.Message}
	case o.Failure != "":
		return &conditions.Fault{Reason: reasonReconcileFailed, Message: o.Failure}
	case o.Front.PoolKindMissing:
		return &conditions.Fault{Reason: "InferencePoolMissing", Message: fmt.Sprintf("spec.routing.mode EndpointPicker needs the kind %s of %s, which the cluster lacks; the Service %s distributes requests over the pods. Install the CRDs of the Gateway API Inference Extension, or use mode Router",
			front.InferencePool.Kind, front.InferencePool.GroupVersion(), moed.Name)}
	}
	if o.StoreFailure != "" {
		return &conditions.Fault{Reason: "StoreUnavailable", Message: "The artifact store does not answer: " + o.StoreFailure +
			". Serving pods are not affected, but routers that start now have no plan tables, and profiling and planning wait. Check the pods of the store"}
	}
	if o.Undecided {
		return nil // an unknown profile or plan is not an error
	}
	return profilingFault(moed, o)
}

const (
	// reasonRanksIgnored is the reason of engine pods that do not serve requests on the rank that the router selected.
	reasonRanksIgnored = "RanksIgnored"
	// maxRouteText is the maximum length, in bytes, of the routes in a message.
	maxRouteText = 80
)

// reasonTiedEmbeddings is the reason of a checkpoint for which the engine leaves the output projection empty.
const reasonTiedEmbeddings = "TiedEmbeddings"

// tiedFault returns an error if the engine leaves the output projection of the checkpoint empty, with or without a
// plan. It returns nil if the engine does not, or if a user-provided command may run another program.
func tiedFault(moed *semmoev1.MoEDeployment, o observation) *conditions.Fault {
	report := o.Inspection.Report
	adapter, err := registry.For(string(moed.Spec.Engine.Type))
	if err != nil || adapter.IgnoresTiedEmbeddings == nil || report == nil || !report.TiedEmbeddings || !adapter.IgnoresTiedEmbeddings(report.Family, moed.Spec.Engine.Command) {
		return nil
	}
	return &conditions.Fault{Reason: reasonTiedEmbeddings, Message: fmt.Sprintf(
		"The checkpoint has tied embeddings and no tensor lm_head.weight, which %s does not support for %s: every logit is 0, although the health check passes. Add lm_head.weight to the checkpoint, or use another spec.engine.type",
		adapter.Type, report.Family)}
}

// ranksFault returns an error if request routers report routes on which engine pods ignore the rank of requests, else
// nil.
func ranksFault(o observation) *conditions.Fault {
	pods := map[string]int{}
	for _, report := range o.Reports {
		seen := map[string]int{}
		for _, ignored := range report.IgnoredRanks {
			seen[ignored.Route] += ignored.Pods
			pods[ignored.Route] = max(pods[ignored.Route], seen[ignored.Route])
		}
	}
	if len(pods) == 0 {
		return nil
	}
	routes := printable.Line(strings.Join(slices.Sorted(maps.Keys(pods)), ", "), maxRouteText)
	return &conditions.Fault{Reason: reasonRanksIgnored, Message: fmt.Sprintf(
		"%s the rank of requests on %s: these requests gain nothing from a plan, and do not count for the local activation rate. Use an engine release that reads the rank on these routes, or other routes",
		podsIgnore(slices.Max(slices.Collect(maps.Values(pods)))), routes)}
}

// podsIgnore returns the subject of the message for a number of pods.
func podsIgnore(pods int) string {
	if pods == 1 {
		return "1 engine pod ignores"
	}
	return fmt.Sprintf("%d engine pods ignore", pods)
}

// routed reports whether requests need a request router.
func routed(moed *semmoev1.MoEDeployment) bool {
	return moed.Spec.Routing.Mode != semmoev1.RoutingModeNone
}

func readyVerdict(moed *semmoev1.MoEDeployment, o observation, status semmoev1.MoEDeploymentStatus, fault *conditions.Fault) conditions.Verdict {
	want := *moed.Spec.Replicas
	enough := max(1, want-*moed.Spec.Rollout.MaxUnavailable)
	routerReady := !routed(moed) || o.Router != nil && o.Router.Status.AvailableReplicas > 0
	switch {
	case o.Front.ServiceTaken != "": // regardless of the number of ready replicas
		return conditions.False(reasonReconcileFailed, fmt.Sprintf("%d of %d replicas are ready, but requests to the Service %s do not reach them: %s",
			status.ReadyReplicas, want, moed.Name, o.Front.ServiceTaken))
	case want == 0 && fault == nil:
		return conditions.True("ScaledToZero", "spec.replicas is 0, so no replica serves")
	case want > 0 && status.ReadyReplicas >= enough && routerReady:
		return conditions.True("Serving", fmt.Sprintf("%d of %d replicas serve at %s", status.ReadyReplicas, want, status.Endpoint))
	case status.ReadyReplicas >= enough && !routerReady && o.RouterProblem != nil:
		return conditions.False(o.RouterProblem.Reason, fmt.Sprintf("%d of %d replicas serve, but no request router is available: %s", status.ReadyReplicas, want, o.RouterProblem.Message))
	case fault != nil:
		return conditions.False(fault.Reason, fault.Message)
	case desired.Paused(moed) && status.Replicas == 0:
		return conditions.False("Paused", "No replica serves, because spec.reconciliation is Paused. Set it to Active to roll out")
	case !o.Download.Complete() && status.Replicas == 0:
		return conditions.False(reasonDownloading, o.Download.Text(moed, status.Download))
	case o.Inspection.Report == nil && status.Replicas == 0:
		return conditions.False("InspectingModel", "The checkpoint is being inspected. No device is used before the inspection succeeds")
	case status.ReadyReplicas >= enough:
		return conditions.False("RouterNotReady", fmt.Sprintf("%d of %d replicas serve, but no request router is available yet", status.ReadyReplicas, want))
	}
	text := fmt.Sprintf("%d of %d replicas are ready; at least %d must be", status.ReadyReplicas, want, enough)
	if queued := queuedText(o); queued != "" {
		return conditions.False(reasonQueued, text+queued)
	}
	return conditions.False("WaitingForReplicas", text)
}

// reasonQueued is the reason of pods that a queue has not admitted yet.
const reasonQueued = "Queued"

// queuedText describes the pods that wait for a scheduling gate; empty for none.
func queuedText(o observation) string {
	count, gate := 0, ""
	for _, pod := range slices.Concat(o.Pods, o.Workers) {
		if of := podhealth.Gate(pod); of != "" {
			count, gate = count+1, of
		}
	}
	switch count {
	case 0:
		return ""
	case 1:
		return ". 1 pod waits for its scheduling gate " + gate
	}
	return fmt.Sprintf(". %d pods wait for their scheduling gate %s", count, gate)
}

func progressingVerdict(moed *semmoev1.MoEDeployment, o observation, status semmoev1.MoEDeploymentStatus, complete, stalled bool) conditions.Verdict {
	switch {
	case desired.Paused(moed):
		return conditions.False("Paused", "spec.reconciliation is Paused: nothing is rolled out")
	case stalled:
		return conditions.False("Stalled", "No progress is possible until the problem in the condition Stalled is fixed")
	case complete:
		return conditions.False("Complete", fmt.Sprintf("All %d replicas are of revision %s", *moed.Spec.Replicas, o.Revision))
	case !o.Download.Complete():
		return conditions.True(reasonDownloading, o.Download.Text(moed, status.Download))
	case o.Inspection.Report == nil:
		return conditions.True("InspectingModel", "The checkpoint is being inspected")
	case o.Rollout.Reason == rollout.ReasonInconclusive:
		return conditions.False(o.Rollout.Reason, o.Rollout.Message)
	case o.Rollout.Phase != "":
		return conditions.True(string(o.Rollout.Phase), o.Rollout.Message)
	}
	reason, text := "WaitingForReplicas", fmt.Sprintf("%d of %d replicas are ready", status.UpdatedReplicas, *moed.Spec.Replicas)
	if !o.Settled {
		reason, text = "RollingOut", fmt.Sprintf("%d of %d replicas are of revision %s", status.UpdatedReplicas, *moed.Spec.Replicas, o.Revision)
	}
	if queued := queuedText(o); queued != "" {
		reason, text = reasonQueued, text+queued
	}
	return conditions.True(reason, text)
}

func stalledVerdict(fault *conditions.Fault, rollout decision.RolloutState) conditions.Verdict {
	if rollout.Held && (fault == nil || !fault.Stalls) {
		return conditions.True(rollout.Reason, rollout.Message)
	}
	return conditions.Stalled(fault)
}

// reconcilingVerdict is True only for work that a new generation causes. After that work is complete, replacing a lost
// pod is repair, not reconciliation.
func reconcilingVerdict(moed *semmoev1.MoEDeployment, o observation, status semmoev1.MoEDeploymentStatus, complete, stalled bool) conditions.Verdict {
	finished := conditions.Finished(moed.Status.Conditions, moed.Generation)
	switch {
	case stalled:
		return conditions.False("Stalled", "See the condition Stalled for the problem to fix")
	case desired.Paused(moed):
		return conditions.False("Paused", "spec.reconciliation is Paused")
	case complete, finished && o.Settled, trialInProgress(o, status, finished):
		return conditions.False("Complete", fmt.Sprintf("Generation %d is in service", moed.Generation))
	default:
		return conditions.True("InProgress", fmt.Sprintf("Generation %d is being brought into service", moed.Generation))
	}
}

// trialInProgress reports whether a canary runs or rolls back next to a generation that is in service: the canary is
// not part of the work for the generation. A canary starts only in this state. A rollback may belong to a canary that
// started next to an older generation.
func trialInProgress(o observation, status semmoev1.MoEDeploymentStatus, finished bool) bool {
	if o.Change != nil {
		return false // the change is the work for the generation
	}
	switch o.Rollout.Phase {
	case semmoev1.RolloutPhaseCanary, semmoev1.RolloutPhasePromoting:
		return true
	case semmoev1.RolloutPhaseRollingBack:
		older := func(pod *corev1.Pod) bool {
			revision := pod.Labels[semmoev1.LabelRevision]
			return revision != o.Revision && revision != o.Rollout.Candidate
		}
		return finished || status.UpdatedReplicas > 0 && !slices.ContainsFunc(o.Pods, older)
	}
	return false
}

// rolloutStatus reports the rollout of a new plan or of a change. It uses the previous report only for the start time
// of the phase.
func rolloutStatus(previous *semmoev1.RolloutStatus, o observation, now time.Time) *semmoev1.RolloutStatus {
	if o.Rollout.Phase == "" {
		return nil
	}
	status := &semmoev1.RolloutStatus{
		Phase: o.Rollout.Phase, Since: metav1.NewTime(now.Truncate(time.Second)), StableRevision: o.StableRevision(),
		CandidateRevision: o.Rollout.Candidate, CandidatePlan: o.Rollout.Plan, Message: printable.Line(o.Rollout.Message, 1024),
	}
	if previous != nil && previous.Phase == status.Phase && previous.CandidateRevision == status.CandidateRevision {
		status.Since = previous.Since
	}
	return status
}

// applyStatus writes the status if it differs from the recorded one, and records events for condition transitions.
func (r *Reconciler) applyStatus(ctx context.Context, moed *semmoev1.MoEDeployment, status semmoev1.MoEDeploymentStatus) error {
	wrote, err := r.statuses.Write(moed, moed.Status, status, func(data []byte) (string, error) {
		intent := semmoeac.MoEDeployment(moed.Name, moed.Namespace).WithStatus(&semmoeac.MoEDeploymentStatusApplyConfiguration{})
		if err := json.Unmarshal(data, intent.Status); err != nil {
			return "", err
		}
		err := r.Status().Apply(ctx, intent, client.FieldOwner(desired.Manager), client.ForceOwnership)
		return ptr.Deref(intent.ResourceVersion, ""), err
	})
	if wrote {
		r.recordTransitions(moed, status)
	}
	return err
}

// workloadReference returns a reference to the workload of a revision, or nil if there is no revision yet.
func workloadReference(moed *semmoev1.MoEDeployment, revision string) runtime.Object {
	if revision == "" {
		return nil
	}
	kind := appsv1.SchemeGroupVersion.WithKind("StatefulSet")
	if desired.PodsPerReplica(moed) > 1 {
		kind = leaderworkersetv1.GroupVersion.WithKind("LeaderWorkerSet")
	}
	return &corev1.ObjectReference{APIVersion: kind.GroupVersion().String(), Kind: kind.Kind, Namespace: moed.Namespace, Name: revisions.WorkloadName(moed, revision)}
}

// eventConditions are the conditions whose changes are recorded as events. For LocalityOnTarget, only changes to or
// from False are recorded: it becomes Unknown at any time when samples are few.
var eventConditions = []string{
	semmoev1.ConditionProgressing, semmoev1.ConditionDegraded, semmoev1.ConditionReady,
	semmoev1.ConditionProfiled, semmoev1.ConditionPlanned, semmoev1.ConditionRolledOut, semmoev1.ConditionLocalityOnTarget,
}

// recordTransitions records an event for each relevant condition transition. An event recorder drops repetitions of the
// same reason within some minutes unless the related object differs, so each event relates to the workload of the
// revision.
func (r *Reconciler) recordTransitions(moed *semmoev1.MoEDeployment, status semmoev1.MoEDeploymentStatus) {
	events := conditionevents.NewEventRecorder(r.Recorder, moed, workloadReference(moed, status.Revision))
	for _, c := range conditionevents.Changes(moed.Status.Conditions, status.Conditions, eventConditions...) {
		kind, holds := c.After.Type, c.Holds()
		switch kind {
		case semmoev1.ConditionDegraded, semmoev1.ConditionRolledOut:
			if c.Before == "" && !holds {
				continue // the condition did not hold before
			}
		case semmoev1.ConditionProfiled, semmoev1.ConditionPlanned:
			if !holds && !c.Lost() {
				continue // the profile or plan records its own events
			}
		case semmoev1.ConditionLocalityOnTarget:
			if c.After.Status != metav1.ConditionFalse && c.Before != metav1.ConditionFalse {
				continue
			}
		}
		missed := kind == semmoev1.ConditionLocalityOnTarget && c.After.Status == metav1.ConditionFalse
		lost := kind == semmoev1.ConditionReady && c.Lost() || kind == semmoev1.ConditionRolledOut && (c.After.Reason == planner.ReasonRolledBack || c.After.Reason == decision.ReasonChangeRolledBack)
		events.Record(c.After, lost || missed || kind == semmoev1.ConditionDegraded && holds)
	}
}
