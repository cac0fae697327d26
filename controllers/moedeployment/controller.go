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
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/childobjects"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/front"
	"github.com/semmoe/operator/controllers/moedeployment/locality"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/controllers/moedeployment/traffic"
	"github.com/semmoe/operator/controllers/storewatch"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/kube/podhealth"
	"github.com/semmoe/operator/internal/kube/result"
	"github.com/semmoe/operator/internal/kube/statuscache"
	"github.com/semmoe/operator/internal/observation/promquery"
	"github.com/semmoe/operator/internal/profile/inspection"
	"github.com/semmoe/operator/internal/router/managerauth"
)

// +kubebuilder:rbac:groups=semmoe.io,resources=moedeployments,verbs=list;watch
// +kubebuilder:rbac:groups=semmoe.io,resources=moedeployments/status,verbs=patch
// +kubebuilder:rbac:groups=semmoe.io,resources=moedeployments/finalizers,verbs=update
// +kubebuilder:rbac:groups=apps,resources=deployments,verbs=list;watch;create;patch;delete
// +kubebuilder:rbac:groups=apps,resources=statefulsets,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups=batch,resources=jobs,verbs=list;watch;create;patch;delete
// +kubebuilder:rbac:groups=core,resources=pods,verbs=list;watch
// +kubebuilder:rbac:groups=core,resources=events,verbs=list
// +kubebuilder:rbac:groups=core,resources=services;serviceaccounts,verbs=list;watch;create;patch;delete
// +kubebuilder:rbac:groups=events.k8s.io,resources=events,verbs=create;patch
// +kubebuilder:rbac:groups=inference.networking.k8s.io,resources=inferencepools,verbs=get;create;patch;delete
// +kubebuilder:rbac:groups=networking.k8s.io,resources=networkpolicies,verbs=list;watch;create;patch;delete
// +kubebuilder:rbac:groups=policy,resources=poddisruptionbudgets,verbs=list;watch;create;patch;delete
// +kubebuilder:rbac:groups=rbac.authorization.k8s.io,resources=rolebindings,verbs=list;watch;create;patch;delete

// Reconciler brings MoEDeployments into service.
type Reconciler struct {
	client.Client
	// Live bypasses the cache. It reads events, needed only for pods with failing volume mounts, and objects that the
	// cache may not contain yet.
	Live client.Reader
	// Recorder records events for condition transitions.
	Recorder events.EventRecorder
	// Secrets reads Secrets without the cache: RBAC allows the operator neither list nor watch of Secrets.
	Secrets client.Reader
	// Prometheus queries the servers that specs name.
	Prometheus *promquery.Client
	// Metrics receives the observed figures.
	Metrics *Metrics
	// HTTP sends requests to engine pods.
	HTTP *http.Client
	// Routers is the client identity for reading observations from request routers.
	Routers managerauth.Identity
	// Store is the access to the artifact store. Request routers read plans from it.
	Store *access.Access
	// StoreWatch reports whether the artifact store answers. If nil, availability is not reported.
	StoreWatch *storewatch.Watch
	// Image is the image of the operator's own containers: request router and inspection.
	Image string
	// PullPolicy is the image pull policy. If empty, the API server sets its default.
	PullPolicy corev1.PullPolicy
	// Namespace is the operator's own namespace. It is empty if the operator runs outside the cluster.
	Namespace string
	// Now is the clock.
	Now func() time.Time

	groups   groupKind
	releases childobjects.Releases
	statuses statuscache.Memory[semmoev1.MoEDeploymentStatus]
}

// SetupWithManager registers the controller.
func (r *Reconciler) SetupWithManager(m ctrl.Manager) error {
	b := ctrl.NewControllerManagedBy(m).
		Named("moedeployment").
		For(&semmoev1.MoEDeployment{}, builder.WithPredicates(predicate.Or[client.Object](predicate.GenerationChangedPredicate{}, predicate.AnnotationChangedPredicate{}, predicate.NewPredicateFuncs(r.statusChanged)))).
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
		Watches(&semmoev1.AffinityProfile{}, handler.EnqueueRequestsFromMapFunc(r.profileUsers)).
		Watches(&semmoev1.PlacementPlan{}, handler.EnqueueRequestsFromMapFunc(r.planPinners)).
		// Workloads own the pods, so the label of the pod maps it to the MoEDeployment.
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, pod client.Object) []reconcile.Request {
			name := pod.GetLabels()[semmoev1.LabelDeployment]
			if name == "" {
				return nil
			}
			return []reconcile.Request{{NamespacedName: types.NamespacedName{Namespace: pod.GetNamespace(), Name: name}}}
		})).
		WithOptions(controller.Options{MaxConcurrentReconciles: 4, ReconciliationTimeout: time.Minute, RateLimiter: retries()})
	if r.StoreWatch != nil {
		b = b.WatchesRawSource(source.Channel(r.StoreWatch.Changed, handler.EnqueueRequestsFromMapFunc(r.storeUsers)))
	}
	c, err := b.Build(r)
	if err != nil {
		return err
	}
	r.groups.watch, r.groups.cache = c.Watch, m.GetCache()
	return nil
}

// retries returns a rate limiter that backs off to at most one minute. A conflicting object of another owner is not in
// the cache, so no event reports its deletion.
func retries() workqueue.TypedRateLimiter[reconcile.Request] {
	return workqueue.NewTypedWithMaxWaitRateLimiter(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request](), time.Minute)
}

// statusChanged lets the update event of a status through that another client changed. Without the event, the status
// would not be restored soon.
func (r *Reconciler) statusChanged(object client.Object) bool {
	moed, ok := object.(*semmoev1.MoEDeployment)
	return ok && r.statuses.Foreign(moed, moed.Status)
}

// profileUsers returns the MoEDeployments that own or reference a profile.
func (r *Reconciler) profileUsers(ctx context.Context, profile client.Object) []reconcile.Request {
	var list semmoev1.MoEDeploymentList
	if err := r.List(ctx, &list, client.InNamespace(profile.GetNamespace()), client.UnsafeDisableDeepCopy); err != nil {
		logr.FromContextOrDiscard(ctx).Error(err, "Failed to list the MoEDeployments that use a profile", "profile", profile.GetName())
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

// storeUsers returns the MoEDeployments that need the artifact store.
func (r *Reconciler) storeUsers(ctx context.Context, _ client.Object) []reconcile.Request {
	var list semmoev1.MoEDeploymentList
	if err := r.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		logr.FromContextOrDiscard(ctx).Error(err, "Failed to list the MoEDeployments that need the artifact store")
		return nil
	}
	var requests []reconcile.Request
	for i := range list.Items {
		if desired.UsesPlans(&list.Items[i]) {
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&list.Items[i])})
		}
	}
	return requests
}

// planPinners returns the MoEDeployments that pin a plan, or that pin new tables for its layout.
func (r *Reconciler) planPinners(ctx context.Context, object client.Object) []reconcile.Request {
	plan, ok := object.(*semmoev1.PlacementPlan)
	if !ok {
		return nil
	}
	var list semmoev1.MoEDeploymentList
	if err := r.List(ctx, &list, client.InNamespace(plan.GetNamespace())); err != nil {
		logr.FromContextOrDiscard(ctx).Error(err, "Failed to list the MoEDeployments that pin a plan", "plan", plan.GetName())
		return nil
	}
	var requests []reconcile.Request
	for i := range list.Items {
		moed := &list.Items[i]
		if ref := moed.Spec.Placement.PlanRef; ref != nil && (ref.Name == plan.Name || r.tablesFor(ctx, moed.Namespace, ref.Name, plan)) {
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(moed)})
		}
	}
	return requests
}

// tablesFor reports whether the plan with this name contains new tables for the layout of another plan.
func (r *Reconciler) tablesFor(ctx context.Context, namespace, name string, layout *semmoev1.PlacementPlan) bool {
	tables := &semmoev1.PlacementPlan{}
	if r.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, tables) != nil || tables.Status.Tier != semmoev1.TierTables || tables.Spec.Current == nil {
		return false
	}
	return tables.Spec.Current.PlanDigest == layout.Status.PlanDigest
}

// children are the objects of a MoEDeployment on which the decisions of a reconciliation are based.
type children struct {
	jobs        []*batchv1.Job
	revisions   []*revisions.Workload // newest first
	enginePods  []*corev1.Pod         // the pods that serve requests
	workerPods  []*corev1.Pod         // the other pods of their replicas
	inspectPods []*corev1.Pod
	routerPods  []*corev1.Pod
	router      *appsv1.Deployment
	// groups reports whether the cluster has the kind LeaderWorkerSet.
	groups bool
}

// Reconcile observes, decides, acts, diagnoses pods that do not serve, and writes the status. An error in one phase
// does not prevent the other phases.
func (r *Reconciler) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	moed := &semmoev1.MoEDeployment{}
	if err := r.Get(ctx, request.NamespacedName, moed); err != nil {
		if apierrors.IsNotFound(err) {
			r.forget(request.NamespacedName)
		}
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if moed.DeletionTimestamp != nil {
		r.forget(request.NamespacedName)
		return ctrl.Result{}, nil // the children are garbage-collected by their owner references
	}
	moed.Status = r.statuses.Latest(moed, moed.Status)
	adopted, adoptErr := r.adopt(ctx, moed)
	if adopted {
		return ctrl.Result{}, adoptErr // the update events requeue the object
	}
	observed, err := r.observe(ctx, moed)
	if err != nil {
		return ctrl.Result{}, errors.Join(adoptErr, err)
	}
	now := r.Now()
	o, decideErr := r.decide(ctx, moed, observed, now)
	actAgain, actErr := r.act(ctx, moed, &o, observed, now)
	o.Failure = result.PermanentErrorText(errors.Join(adoptErr, decideErr, actErr))
	podsAgain, podsErr := r.diagnose(ctx, &o, observed, now)

	status := statusOf(moed, o, now)
	if decideErr == nil || planner.IsRefused(decideErr) {
		r.Metrics.Set(request.NamespacedName, figuresOf(o, locality.ReplansLastDay(replansOf(moed, o.Planning.Plans), now), status.Rollout, soakOf(moed)))
	}
	if err := errors.Join(adoptErr, decideErr, actErr, podsErr, r.applyStatus(ctx, moed, status)); err != nil {
		return ctrl.Result{}, err
	}
	return ctrl.Result{RequeueAfter: result.ShortestDelay(actAgain, podsAgain, o.Planning.Again, pollDelay(moed, o))}, nil
}

// forget removes the metrics and the cached status of a deleted object.
func (r *Reconciler) forget(name types.NamespacedName) {
	r.Metrics.forget(name)
	r.statuses.Forget(name)
}

// decide determines what to serve: the model, the profile, the plan, and how observed traffic compares to the plan. It
// creates missing profiles and plans. On an error, the plan is unknown, and there is no desired revision. If the error
// only means that a profile or plan was refused, the desired revision is still set. Serving pods are not affected.
func (r *Reconciler) decide(ctx context.Context, moed *semmoev1.MoEDeployment, observed children, now time.Time) (observation, error) {
	var err error
	o := observation{Invalid: revisions.Validate(moed), Pods: observed.enginePods, Workers: observed.workerPods, Router: observed.router}
	if desired.UsesPlans(moed) {
		o.StoreFailure = r.StoreWatch.Failure()
	}
	if o.Invalid == nil {
		o.Invalid = revisions.ValidateRelease(moed, revisions.Release(moed, observed.revisions))
	}
	if o.Invalid == nil {
		o.Invalid = revisions.ValidateGroups(moed, observed.groups)
	}
	asked := desired.ObservesSteps(moed)
	if asked {
		o.Reports = traffic.ReadRouters(ctx, r.Routers.HTTP, observed.routerPods)
		o.Steps = stepsOf(o.Reports)
	}
	o.Inspection = inspection.Observe(inspectionInputs(moed).Hash(), observed.jobs, observed.inspectPods)
	if report := o.Inspection.Report; report != nil && o.Invalid == nil {
		if o.Invalid = revisions.ValidateModel(moed, *report); o.Invalid == nil {
			// Serving does not depend on objects that cannot be created.
			if o.Planning, err = r.planner(o.Steps.Sizes...).Plan(ctx, moed, *report, observed.revisions, observed.enginePods); err != nil && !planner.IsRefused(err) {
				o.Undecided = true
				return o, err
			}
			o.Revision = revisions.Of(moed, *report, o.Planning.Serving)
			if o.Planning.Candidate != nil {
				o.CandidateRevision = revisions.Of(moed, *report, o.Planning.Candidate)
			}
		}
	}
	if inServiceErr := r.observeServing(ctx, moed, observed, &o); inServiceErr != nil {
		o.Undecided = true
		return o, errors.Join(err, inServiceErr)
	}
	if !asked && pollsRouters(moed, o) {
		o.Reports = traffic.ReadRouters(ctx, r.Routers.HTTP, observed.routerPods)
	}
	if desired.Observes(moed) {
		o.Observed = locality.TrafficOf(o.Reports, o.servingRevision())
		o.RankTokens, o.Enough = o.Observed.RankLoads(), o.Observed.Enough()
	}
	o.Drift = r.assess(ctx, moed, o.inService(), o.Reports, observed.revisions, now)
	return o, err
}

// observeServing adds the serving workload and its plan if they are not the desired ones.
func (r *Reconciler) observeServing(ctx context.Context, moed *semmoev1.MoEDeployment, observed children, o *observation) error {
	last := ""
	if moed.Status.Serving != nil {
		last = moed.Status.Serving.Revision
	}
	serving := revisions.Serving(observed.revisions, observed.enginePods, o.Revision, last)
	if serving == nil {
		return nil
	}
	o.Release = revisions.ReportedRelease(serving)
	if o.Ranks = revisions.Ranks(serving); serving.Labels[semmoev1.LabelRevision] == o.Revision {
		return nil
	}
	var err error
	o.Serving = serving
	o.InService, err = r.planner().InService(ctx, moed, serving)
	return err
}

// act applies the decision to the cluster and adds the results to the observation. It returns the delay until it must
// run again, or zero.
func (r *Reconciler) act(ctx context.Context, moed *semmoev1.MoEDeployment, o *observation, observed children, now time.Time) (time.Duration, error) {
	inspect := o.Inspection
	var changedErr, keptErr, recreationsErr, releasesErr, rolloutErr, childrenErr, replanErr error
	var releasesAgain time.Duration
	if len(inspect.Obsolete) > 0 {
		var changed bool
		if changed, changedErr = childobjects.SpecChanged(ctx, r.Live, moed); changedErr != nil || changed {
			inspect.Obsolete = nil // the latest spec may need them
		}
	}
	again, inspectErr := inspection.Reconcile(ctx, r.Client, desired.Manager, inspect, r.nextInspection(moed), now)
	if !desired.Paused(moed) {
		recreationsErr = childobjects.RecordRecreations(ctx, r.Client, observed.revisions, observed.enginePods, observed.workerPods, now)
		releasesAgain, releasesErr = r.releases.Record(ctx, r.Client, r.HTTP, observed.revisions, observed.enginePods, now)
		for _, workload := range observed.revisions {
			keptErr = errors.Join(keptErr, childobjects.KeepPlan(ctx, r.Client, workload))
		}
	}
	o.Settled, o.Rollout, rolloutErr = r.reconcileRevisions(ctx, moed, *o, observed.revisions, now)
	o.Front, childrenErr = r.front().Reconcile(ctx, moed, front.Engines{Workloads: observed.revisions, Pods: observed.enginePods})
	if o.Revision != "" {
		o.Replan, replanErr = r.planner().Replan(ctx, moed, o.Inspection.Report.ModelDigest, o.Planning, planner.DriftOf(o.Drift, now))
	}
	return result.ShortestDelay(again, o.Rollout.Again, releasesAgain), errors.Join(changedErr, inspectErr, recreationsErr, releasesErr, keptErr, rolloutErr, childrenErr, replanErr)
}

// diagnose determines what prevents pods from serving or from being created. It returns the delay until more can be
// known, or zero.
func (r *Reconciler) diagnose(ctx context.Context, o *observation, observed children, now time.Time) (time.Duration, error) {
	pods := slices.Concat(observed.enginePods, observed.workerPods, observed.inspectPods)
	// OutputChanged is more specific for these pods than a crash loop. After an error it is not decided yet.
	if o.Planning.Hold.Reason == planner.ReasonOutputChanged || o.Revision == "" {
		pods = slices.DeleteFunc(pods, func(pod *corev1.Pod) bool { _, found := revisions.ChangedOutput(pod); return found })
	}
	failedMounts, mountsErr := podhealth.FailedMounts(ctx, r.Live, slices.Concat(pods, observed.routerPods), now)
	var again, routerAgain time.Duration
	if o.RouterProblem, routerAgain = podhealth.Find(observed.routerPods, failedMounts, now); o.RouterProblem == nil {
		o.RouterProblem = refusedRouter(observed.router)
	}
	// Pods of a group that is being recreated come and go, and their own problems change with each pod.
	if o.Problem = revisions.RecreationProblem(observed.revisions); o.Problem != nil {
		return routerAgain, mountsErr
	}
	if o.Problem, again = podhealth.Find(pods, failedMounts, now); o.Problem != nil {
		return result.ShortestDelay(again, routerAgain), mountsErr
	}
	var refusedErr error
	o.Problem, refusedErr = r.refusedPods(ctx, observed, *o, now)
	return result.ShortestDelay(again, routerAgain), errors.Join(mountsErr, refusedErr)
}

// refusedRouter returns why the pods of the request router cannot be created, or nil. The Deployment controller reports
// the cause in a condition.
func refusedRouter(router *appsv1.Deployment) *podhealth.Problem {
	if router == nil {
		return nil
	}
	for _, condition := range router.Status.Conditions {
		if condition.Type == appsv1.DeploymentReplicaFailure && condition.Status == corev1.ConditionTrue {
			return podhealth.RouterPodsRejected(podhealth.LastLine(condition.Message))
		}
	}
	return nil
}

// pollDelay returns the polling delay for state that no watch reports: the ranks in an InferencePool, a missing kind
// that the spec needs, traffic, and user-provided ConfigMaps. It returns zero if nothing needs polling.
func pollDelay(moed *semmoev1.MoEDeployment, o observation) time.Duration {
	var pool, groups, polling, hardware time.Duration
	if machines := moed.Spec.Placement.Hardware; machines != nil && machines.ConfigMap != nil {
		hardware = planner.HardwarePeriod
	}
	if moed.Spec.Routing.Mode == semmoev1.RoutingModeEndpointPicker {
		pool = front.PoolPeriod
	}
	if o.Invalid != nil && o.Invalid.Reason == revisions.ReasonNoGroups {
		groups = groupKindPeriod
	}
	if pollsRouters(moed, o) || moed.Spec.Drift.Source == semmoev1.DriftSourcePrometheus && o.servingRevision() != "" {
		polling = observePeriod
	}
	return result.ShortestDelay(pool, groups, polling, hardware)
}

// pollsRouters reports whether the controller polls the routers: they sample requests, or a plan is in service (which
// needs engines that respect ranks), or plans depend on the steps of engines.
func pollsRouters(moed *semmoev1.MoEDeployment, o observation) bool {
	return o.servingRevision() != "" && (desired.Observes(moed) || o.inService().Serving != nil || desired.ObservesSteps(moed))
}

// planner returns the Planner, which creates plans for the batch sizes that engines report, and selects among them.
func (r *Reconciler) planner(batchSizes ...int32) *planner.Planner {
	return &planner.Planner{Client: r.Client, Live: r.Live, Recorder: r.Recorder, HTTP: r.HTTP, Now: r.Now, BatchSizes: batchSizes}
}

// front returns the Front, which manages the objects in front of the engines.
func (r *Reconciler) front() *front.Front {
	return &front.Front{Client: r.Client, Live: r.Live, Store: r.Store, Image: r.Image, PullPolicy: r.PullPolicy, Namespace: r.Namespace, ManagerAuthority: r.Routers.Authority}
}

func (r *Reconciler) observe(ctx context.Context, moed *semmoev1.MoEDeployment) (children, error) {
	var observed children
	ours := []client.ListOption{client.InNamespace(moed.Namespace), client.MatchingLabels{semmoev1.LabelDeployment: moed.Name}}
	var jobs batchv1.JobList
	var workloads appsv1.StatefulSetList
	var pods corev1.PodList
	if err := errors.Join(r.List(ctx, &jobs, ours...), r.List(ctx, &workloads, ours...), r.List(ctx, &pods, ours...)); err != nil {
		return observed, fmt.Errorf("failed to list children: %w", err)
	}
	for i := range jobs.Items {
		if metav1.IsControlledBy(&jobs.Items[i], moed) {
			observed.jobs = append(observed.jobs, &jobs.Items[i])
		}
	}
	for i := range workloads.Items {
		if workload := &workloads.Items[i]; metav1.IsControlledBy(workload, moed) && workload.DeletionTimestamp == nil {
			observed.revisions = append(observed.revisions, revisions.StatefulSet(workload))
		}
	}
	groups, known, err := r.listGroups(ctx, moed)
	if err != nil {
		return observed, err
	}
	observed.revisions, observed.groups = append(observed.revisions, groups...), known
	slices.SortFunc(observed.revisions, func(a, b *revisions.Workload) int {
		return cmp.Or(b.CreationTimestamp.Compare(a.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	for i := range pods.Items {
		switch pods.Items[i].Labels[semmoev1.LabelComponent] {
		case semmoev1.ComponentEngine:
			observed.enginePods = append(observed.enginePods, &pods.Items[i])
		case semmoev1.ComponentWorker:
			observed.workerPods = append(observed.workerPods, &pods.Items[i])
		case semmoev1.ComponentInspect:
			observed.inspectPods = append(observed.inspectPods, &pods.Items[i])
		case semmoev1.ComponentRouter:
			observed.routerPods = append(observed.routerPods, &pods.Items[i])
		}
	}
	for i, leader := range observed.enginePods {
		observed.enginePods[i] = revisions.AsReplica(leader, observed.workerPods, r.Now())
	}
	router := &appsv1.Deployment{}
	err = r.Get(ctx, client.ObjectKey{Namespace: moed.Namespace, Name: desired.RouterName(moed)}, router)
	if err == nil {
		observed.router = router
	}
	return observed, client.IgnoreNotFound(err)
}

// nextInspection returns the constructor of an inspection Job per attempt, or nil while the spec is paused.
func (r *Reconciler) nextInspection(moed *semmoev1.MoEDeployment) func(attempt int) *batchv1.Job {
	if desired.Paused(moed) {
		return nil
	}
	return func(attempt int) *batchv1.Job { return inspectionJob(moed, r.Image, r.PullPolicy, attempt) }
}

// refusedPods returns why the pods of a workload or of the inspection cannot be created, for example a quota or the pod
// security standard of the namespace. In this case no pod exists that could report the cause.
func (r *Reconciler) refusedPods(ctx context.Context, observed children, o observation, now time.Time) (*podhealth.Problem, error) {
	var owners []client.Object
	for _, workload := range observed.revisions {
		if state := revisions.StateOf(workload, o.Pods, o.Workers); workload.UID != "" && state.Existing < state.Replicas {
			owners = append(owners, workload.Object)
		}
		for _, name := range revisions.GroupsLackingPods(workload, o.Pods, observed.workerPods) {
			group := &appsv1.StatefulSet{}
			err := r.Live.Get(ctx, client.ObjectKey{Namespace: workload.Namespace, Name: name}, group)
			if err == nil {
				owners = append(owners, group)
			} else if !apierrors.IsNotFound(err) {
				return nil, fmt.Errorf("failed to read StatefulSet %s: %w", name, err)
			}
		}
	}
	if job := o.Inspection.Running; job != nil && job.Status.Active == 0 {
		owners = append(owners, job)
	}
	for _, owner := range owners {
		message, err := podhealth.LastEvent(ctx, r.Live, owner, "FailedCreate", now)
		if err != nil {
			return nil, err
		}
		if message != "" {
			return podhealth.PodsRejected(message), nil
		}
	}
	return nil, nil
}
