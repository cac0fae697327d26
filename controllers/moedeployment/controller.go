package moedeployment

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/go-logr/logr"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/inspection"
	"github.com/semmoe/operator/internal/outcome"
	"github.com/semmoe/operator/internal/podhealth"
	"github.com/semmoe/operator/internal/promquery"
)

// +kubebuilder:rbac:groups=semmoe.io,resources=moedeployments,verbs=get;list;watch
// +kubebuilder:rbac:groups=semmoe.io,resources=moedeployments/status,verbs=patch
// +kubebuilder:rbac:groups=semmoe.io,resources=moedeployments/finalizers,verbs=update
// +kubebuilder:rbac:groups=apps,resources=deployments,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups=apps,resources=statefulsets,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups=batch,resources=jobs,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups=core,resources=pods,verbs=get;list;watch
// +kubebuilder:rbac:groups=core,resources=events,verbs=list
// +kubebuilder:rbac:groups=core,resources=services;serviceaccounts,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups=events.k8s.io,resources=events,verbs=create;patch
// +kubebuilder:rbac:groups=inference.networking.k8s.io,resources=inferencepools,verbs=get;create;patch;delete
// +kubebuilder:rbac:groups=networking.k8s.io,resources=networkpolicies,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups=policy,resources=poddisruptionbudgets,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups=rbac.authorization.k8s.io,resources=rolebindings,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups=rbac.authorization.k8s.io,resources=clusterroles,resourceNames=semmoe-router,verbs=bind

// Reconciler brings MoEDeployments into service.
type Reconciler struct {
	client.Client
	// Events reads events past the cache: they are only needed for a pod whose volumes cannot be mounted.
	Events client.Reader
	// Recorder tells transitions.
	Recorder events.EventRecorder
	// Secrets reads Secrets past the cache: the operator may neither list nor watch them.
	Secrets client.Reader
	// Prometheus asks the servers that specs name.
	Prometheus *promquery.Client
	// Metrics are told what is observed.
	Metrics *Metrics
	// HTTP asks the request routers what they observed.
	HTTP *http.Client
	// Store is how the artifact store is reached; request routers read plans from it.
	Store *access.Access
	// Image is the image of our own containers: the request router and the inspection.
	Image string
	// Namespace is the operator's own; empty where it runs outside of the cluster.
	Namespace string
	// Now is the clock.
	Now func() time.Time
}

// SetupWithManager registers the controller.
func (r *Reconciler) SetupWithManager(m ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(m).
		Named("moedeployment").
		For(&semmoev1.MoEDeployment{}, builder.WithPredicates(predicate.Or[client.Object](predicate.GenerationChangedPredicate{}, predicate.AnnotationChangedPredicate{}, statusWiped))).
		Owns(&appsv1.StatefulSet{}).
		Owns(&appsv1.Deployment{}).
		Owns(&batchv1.Job{}).
		Owns(&corev1.Service{}).
		Owns(&corev1.ConfigMap{}).
		Owns(&corev1.ServiceAccount{}).
		Owns(&policyv1.PodDisruptionBudget{}).
		Owns(&networkingv1.NetworkPolicy{}).
		Owns(&rbacv1.RoleBinding{}).
		Owns(&semmoev1.PlacementPlan{}).
		Watches(&semmoev1.AffinityProfile{}, handler.EnqueueRequestsFromMapFunc(r.whoseProfile)).
		Watches(&semmoev1.PlacementPlan{}, handler.EnqueueRequestsFromMapFunc(r.whosePin)).
		// Pods belong to workloads, not to us: their label leads back.
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, pod client.Object) []reconcile.Request {
			name := pod.GetLabels()[semmoev1.LabelDeployment]
			if name == "" {
				return nil
			}
			return []reconcile.Request{{NamespacedName: types.NamespacedName{Namespace: pod.GetNamespace(), Name: name}}}
		})).
		WithOptions(controller.Options{MaxConcurrentReconciles: 4, ReconciliationTimeout: time.Minute}).
		Complete(r)
}

// statusWiped lets a status that somebody else removed through: nothing else would bring it back soon.
var statusWiped = predicate.NewPredicateFuncs(func(object client.Object) bool {
	moed, ok := object.(*semmoev1.MoEDeployment)
	return ok && len(moed.Status.Conditions) == 0
})

// whoseProfile are the MoEDeployments that a profile belongs to, or that name it.
func (r *Reconciler) whoseProfile(ctx context.Context, profile client.Object) []reconcile.Request {
	var list semmoev1.MoEDeploymentList
	if err := r.List(ctx, &list, client.InNamespace(profile.GetNamespace()), client.UnsafeDisableDeepCopy); err != nil {
		logr.FromContextOrDiscard(ctx).Error(err, "Listing the MoEDeployments that a profile concerns", "profile", profile.GetName())
		return nil
	}
	var requests []reconcile.Request
	for i := range list.Items {
		moed := &list.Items[i]
		named := moed.Spec.Profiling != nil && moed.Spec.Profiling.ProfileRef != nil && moed.Spec.Profiling.ProfileRef.Name == profile.GetName()
		if named || metav1.IsControlledBy(profile, moed) {
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(moed)})
		}
	}
	return requests
}

// whosePin are the MoEDeployments that pin a plan.
func (r *Reconciler) whosePin(ctx context.Context, plan client.Object) []reconcile.Request {
	var list semmoev1.MoEDeploymentList
	if err := r.List(ctx, &list, client.InNamespace(plan.GetNamespace())); err != nil {
		logr.FromContextOrDiscard(ctx).Error(err, "Listing the MoEDeployments that pin a plan", "plan", plan.GetName())
		return nil
	}
	var requests []reconcile.Request
	for i := range list.Items {
		moed := &list.Items[i]
		if ref := moed.Spec.Placement.PlanRef; ref != nil && ref.Name == plan.GetName() {
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(moed)})
		}
	}
	return requests
}

// children are the objects of a MoEDeployment that a reconciliation decides from.
type children struct {
	jobs        []*batchv1.Job
	revisions   []*appsv1.StatefulSet // newest first
	enginePods  []*corev1.Pod
	inspectPods []*corev1.Pod
	routerPods  []*corev1.Pod
	router      *appsv1.Deployment
}

// Reconcile observes, acts on what it observed, and reports.
func (r *Reconciler) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	moed := &semmoev1.MoEDeployment{}
	if err := r.Get(ctx, request.NamespacedName, moed); err != nil {
		if apierrors.IsNotFound(err) {
			r.Metrics.forget(request.NamespacedName)
		}
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if moed.DeletionTimestamp != nil {
		r.Metrics.forget(request.NamespacedName)
		return ctrl.Result{}, nil // the children are garbage-collected by their owner references
	}
	observed, err := r.observe(ctx, moed)
	if err != nil {
		return ctrl.Result{}, err
	}
	now := r.Now()
	o := observation{Invalid: validate(moed), Pods: observed.enginePods, Router: observed.router}
	o.Inspection = inspection.Observe(inspectionInputs(moed).Hash(), observed.jobs, observed.inspectPods)
	var planErr error
	if report := o.Inspection.Report; report != nil && o.Invalid == nil {
		if err := report.CheckExpertParallelSize(int(moed.Spec.Parallelism.ExpertParallelSize)); err != nil {
			o.Invalid = invalidf("InvalidExpertParallelSize", "spec.parallelism.expertParallelSize: %v", err)
		} else if o.Planning, planErr = r.reconcilePlanning(ctx, moed, *report, observed); planErr == nil {
			// Without knowing the plan there is no revision to ask for: what serves goes on.
			o.Revision = revisionOf(moed, *report, o.Planning.Serving)
		}
	}

	if o.Planning.Candidate != nil {
		o.CandidateRevision = revisionOf(moed, *o.Inspection.Report, o.Planning.Candidate)
	}
	if observes(moed) && o.Revision != "" {
		o.Reports = r.observeRouters(ctx, observed.routerPods)
		o.Observed = trafficOf(o.Reports, o.Revision)
		o.RankTokens, o.Enough = o.Observed.rankLoads(), o.Observed.enough()
	}
	if planErr == nil {
		o.Drift = r.assess(ctx, moed, o.Planning.Serving, o.Planning.Promise, o.Planning.Plans, o.Reports, observed.revisions, now)
	}

	after, inspectErr := inspection.Reconcile(ctx, r.Client, manager, o.Inspection, r.nextInspection(moed), now)
	settled, rolledOut, rolloutErr := r.reconcileRevisions(ctx, moed, o, observed.revisions, now)
	o.Settled, o.Rollout = settled, rolledOut
	poolKindMissing, childrenErr := r.reconcileChildren(ctx, moed)
	o.PoolKindMissing = poolKindMissing
	phases := errors.Join(inspectErr, planErr, rolloutErr, childrenErr)
	o.Failure = outcome.Lasting(phases)

	pods := append(slices.Clone(observed.enginePods), observed.inspectPods...)
	failedMounts, err := podhealth.FailedMounts(ctx, r.Events, pods, now)
	if err != nil {
		phases = errors.Join(phases, err)
	}
	found, again := podhealth.Find(pods, failedMounts, now)
	if found == nil {
		if found, err = r.refusedPods(ctx, observed.revisions, o, now); err != nil {
			phases = errors.Join(phases, err)
		}
	}
	o.Problem = found
	after = outcome.Soonest(outcome.Soonest(after, again), outcome.Soonest(o.Planning.Again, o.Rollout.Again))
	if moed.Spec.Routing.Mode == semmoev1.RoutingModeEndpointPicker {
		after = outcome.Soonest(after, poolPeriod)
	}
	if (observes(moed) || moed.Spec.Drift.Source == semmoev1.DriftSourcePrometheus) && o.Revision != "" {
		after = outcome.Soonest(after, observePeriod)
	}
	if o.Inspection.Report != nil && o.Invalid == nil && planErr == nil {
		if o.Replan, err = r.reconcileReplan(ctx, moed, o.Inspection.Report.ModelDigest, o.Planning, driftOf(o.Drift, now)); err != nil {
			phases = errors.Join(phases, err)
		}
	}
	status := statusOf(moed, o, now)
	if planErr == nil {
		r.Metrics.set(request.NamespacedName, figuresOf(o, replansLastDay(replansOf(moed, o.Planning.Plans), now), status.Rollout))
	}
	if err := r.applyStatus(ctx, moed, status); err != nil {
		phases = errors.Join(phases, err)
	}
	if phases != nil {
		return ctrl.Result{}, phases
	}
	return ctrl.Result{RequeueAfter: after}, nil
}

func (r *Reconciler) observe(ctx context.Context, moed *semmoev1.MoEDeployment) (children, error) {
	var observed children
	ours := []client.ListOption{client.InNamespace(moed.Namespace), client.MatchingLabels{semmoev1.LabelDeployment: moed.Name}}
	var jobs batchv1.JobList
	var workloads appsv1.StatefulSetList
	var pods corev1.PodList
	if err := errors.Join(r.List(ctx, &jobs, ours...), r.List(ctx, &workloads, ours...), r.List(ctx, &pods, ours...)); err != nil {
		return observed, fmt.Errorf("list children: %w", err)
	}
	for i := range jobs.Items {
		if metav1.IsControlledBy(&jobs.Items[i], moed) {
			observed.jobs = append(observed.jobs, &jobs.Items[i])
		}
	}
	for i := range workloads.Items {
		if workload := &workloads.Items[i]; metav1.IsControlledBy(workload, moed) && workload.DeletionTimestamp == nil {
			observed.revisions = append(observed.revisions, workload)
		}
	}
	slices.SortFunc(observed.revisions, func(a, b *appsv1.StatefulSet) int {
		return cmp.Or(b.CreationTimestamp.Compare(a.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	for i := range pods.Items {
		switch pods.Items[i].Labels[semmoev1.LabelComponent] {
		case semmoev1.ComponentEngine:
			observed.enginePods = append(observed.enginePods, &pods.Items[i])
		case semmoev1.ComponentInspect:
			observed.inspectPods = append(observed.inspectPods, &pods.Items[i])
		case semmoev1.ComponentRouter:
			observed.routerPods = append(observed.routerPods, &pods.Items[i])
		}
	}
	router := &appsv1.Deployment{}
	err := r.Get(ctx, client.ObjectKey{Namespace: moed.Namespace, Name: routerName(moed)}, router)
	if err == nil {
		observed.router = router
	}
	return observed, client.IgnoreNotFound(err)
}

// nextInspection makes the Job of an attempt; nil while nothing new may be started.
func (r *Reconciler) nextInspection(moed *semmoev1.MoEDeployment) func(attempt int) *batchv1.Job {
	if paused(moed) {
		return nil
	}
	return func(attempt int) *batchv1.Job { return inspectionJob(moed, r.Image, attempt) }
}

// refusedPods reads why the pods of a workload, or of the inspection, cannot be created: a quota, or the pod security
// standard of the namespace. No pod exists then that could tell.
func (r *Reconciler) refusedPods(ctx context.Context, workloads []*appsv1.StatefulSet, o observation, now time.Time) (*podhealth.Problem, error) {
	var owners []client.Object
	for _, workload := range workloads {
		if state := stateOf(workload, o.Pods); workload.UID != "" && state.Existing < state.Replicas {
			owners = append(owners, workload)
		}
	}
	if job := o.Inspection.Running; job != nil && job.Status.Active == 0 {
		owners = append(owners, job)
	}
	for _, owner := range owners {
		message, err := podhealth.LastEvent(ctx, r.Events, owner, "FailedCreate", now)
		if err != nil {
			return nil, err
		}
		if message != "" {
			return podhealth.Refused(message), nil
		}
	}
	return nil, nil
}
