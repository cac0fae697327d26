// SPDX-License-Identifier: Apache-2.0

package moedeployment

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
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
	"k8s.io/utils/ptr"
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
	"github.com/semmoe/operator/controllers/moedeployment/decision"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/download"
	"github.com/semmoe/operator/controllers/moedeployment/front"
	"github.com/semmoe/operator/controllers/moedeployment/locality"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/controllers/moedeployment/plans"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/controllers/storewatch"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/kube/lookup"
	"github.com/semmoe/operator/internal/kube/podhealth"
	"github.com/semmoe/operator/internal/kube/result"
	"github.com/semmoe/operator/internal/kube/statuscache"
	"github.com/semmoe/operator/internal/kube/writes"
	"github.com/semmoe/operator/internal/observation/promquery"
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

// Reconcile observes, decides, writes, diagnoses pods that do not serve, and writes the status. An error in one phase
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
	s, err := r.observe(ctx, moed)
	if err != nil {
		return ctrl.Result{}, errors.Join(adoptErr, err)
	}
	d, decideErr := r.applyPlans(ctx, s, r.decide(ctx, s))
	logDecision(ctx, moed, d)
	o := observationOf(s, d)
	actAgain, actErr := r.act(ctx, &o, s, &d)
	o.Failure = result.PermanentErrorText(errors.Join(adoptErr, decideErr, actErr))
	podsAgain, podsErr := r.diagnose(ctx, &o, s)

	status := statusOf(moed, o, s.Now)
	if decideErr == nil || writes.IsRefused(decideErr) {
		r.Metrics.Set(request.NamespacedName, figuresOf(o, locality.ReplansLastDay(decision.ReplansOf(moed, o.Planning.Plans), s.Now), status.Rollout, desired.Soak(moed)))
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

// downloadPeriod is the interval at which the progress of a download is requested.
const downloadPeriod = 10 * time.Second

// maxQuestions is the maximum number of reads that depend on decisions. Each question is asked once, and there are ten.
const maxQuestions = 10

// decide decides from a snapshot, and answers the questions of the decision in the snapshot.
func (r *Reconciler) decide(ctx context.Context, s *decision.Snapshot) decision.Decision {
	d := decision.Decide(s)
	for range maxQuestions {
		if d.Question == nil {
			return d
		}
		if err := r.answer(ctx, s, d.Question); err != nil {
			s.Unread = errors.Join(s.Unread, err)
			return decision.Decide(s).WithoutDecision(s.Unread)
		}
		d = decision.Decide(s)
	}
	if d.Question != nil {
		return d.WithoutDecision(fmt.Errorf("question %T is not answered", d.Question))
	}
	return d
}

// applyPlans writes the profiles, plans and tables of a decision, before anything that depends on them. After a refused
// write it decides again, so that nothing relies on that write. After another error there is no decision. It returns
// the error to report.
func (r *Reconciler) applyPlans(ctx context.Context, s *decision.Snapshot, d decision.Decision) (decision.Decision, error) {
	refused, err := plans.Apply(ctx, r.writer(), &s.Snapshot, d.Writes)
	if err != nil {
		return d.WithoutDecision(err), errors.Join(d.Refused, refused, err)
	}
	if refused != nil {
		d = r.decide(ctx, s)
	}
	return d, errors.Join(d.Refused, refused, d.Err)
}

// logDecision logs a decision that changes what serves. Steady state logs nothing.
func logDecision(ctx context.Context, moed *semmoev1.MoEDeployment, d decision.Decision) {
	if d.Undecided || d.Revision == "" || d.Revision == moed.Status.Revision {
		return
	}
	plan := ""
	if d.Planning.Serving != nil {
		plan = d.Planning.Serving.Short()
	}
	logr.FromContextOrDiscard(ctx).Info("Decided on another revision", "revision", d.Revision, "previousRevision", moed.Status.Revision, "plan", plan, "holdReason", d.Planning.Hold.Reason)
}

// act applies the decision to the cluster and adds the results to the observation. It returns the delay until it must
// run again, or zero.
func (r *Reconciler) act(ctx context.Context, o *observation, s *decision.Snapshot, d *decision.Decision) (time.Duration, error) {
	moed, inspect, downloads := s.Moed, o.Inspection, o.Download
	var changedErr, keptErr, recreationsErr, releasesErr, childrenErr error
	var releasesAgain time.Duration
	if len(inspect.Obsolete)+len(downloads.Obsolete) > 0 {
		var changed bool
		if changed, changedErr = childobjects.SpecChanged(ctx, r.Live, moed); changedErr != nil || changed {
			inspect.Obsolete, downloads.Obsolete = nil, nil // the latest spec may need them
		}
	}
	downloadWrites, downloadAgain := downloads.Writes(r.nextDownload(s), s.Now)
	downloadErr := r.write(ctx, moed, downloadWrites...)
	inspections, again, inspectErr := inspect.Writes(r.nextInspection(moed), s.Now)
	inspectErr = errors.Join(inspectErr, explainImageVolumes(moed, r.write(ctx, moed, inspections...)))
	if !desired.Paused(moed) { // facts that outlive pods are recorded before replicas move
		recreationsErr = r.write(ctx, moed, revisions.RecordRecreations(s.Workloads, s.Pods, s.Workers, s.Now)...)
		var releases []writes.Write
		releases, releasesAgain = r.releases.Ask(ctx, r.HTTP, s.Workloads, s.Pods, s.Now)
		releasesErr = r.write(ctx, moed, releases...)
		for _, workload := range s.Workloads {
			keptErr = errors.Join(keptErr, r.write(ctx, moed, revisions.KeepPlan{Workload: workload}))
		}
	}
	moved := decision.DecideRollout(s, d)
	rolloutErr := errors.Join(moved.Err, r.write(ctx, moed, moved.Writes...))
	o.Rollout, o.Settled = moved.RolloutState, moved.Settled && rolloutErr == nil
	o.Front, childrenErr = r.front().Reconcile(ctx, moed, front.Engines{Workloads: s.Workloads, Pods: s.Pods})
	replanErr := r.write(ctx, moed, d.ReplanWrites...)
	return result.ShortestDelay(again, downloadAgain, o.Rollout.Again, releasesAgain), errors.Join(changedErr, downloadErr, inspectErr, recreationsErr, releasesErr, keptErr, rolloutErr, childrenErr, replanErr)
}

// write executes writes in order, until one fails.
func (r *Reconciler) write(ctx context.Context, moed *semmoev1.MoEDeployment, writes ...writes.Write) error {
	for _, write := range writes {
		if err := r.writer().Write(ctx, moed, write); err != nil {
			return err
		}
	}
	return nil
}

// diagnose determines what prevents pods from serving or from being created. It returns the delay until more can be
// known, or zero.
func (r *Reconciler) diagnose(ctx context.Context, o *observation, observed *decision.Snapshot) (time.Duration, error) {
	now := observed.Now
	pods := slices.Concat(observed.Pods, observed.Workers, observed.InspectPods, observed.DownloadPods)
	// OutputChanged is more specific for these pods than a crash loop. After an error it is not decided yet.
	if o.Planning.Hold.Reason == planner.ReasonOutputChanged || o.Revision == "" {
		pods = slices.DeleteFunc(pods, func(pod *corev1.Pod) bool { _, found := revisions.ChangedOutput(pod); return found })
	}
	failedMounts, mountsErr := lookup.FailedMounts(ctx, r.Live, slices.Concat(pods, observed.RouterPods), now)
	var again, routerAgain time.Duration
	if o.RouterProblem, routerAgain = podhealth.Find(observed.RouterPods, failedMounts, now); o.RouterProblem == nil {
		o.RouterProblem = refusedRouter(observed.Router)
	}
	// Pods of a group that is being recreated come and go, and their own problems change with each pod.
	if o.Problem = revisions.RecreationProblem(observed.Workloads); o.Problem != nil {
		return routerAgain, mountsErr
	}
	if o.Problem, again = podhealth.Find(pods, failedMounts, now); o.Problem != nil {
		return result.ShortestDelay(again, routerAgain), mountsErr
	}
	var refusedErr error
	var refusedAgain time.Duration
	o.Problem, refusedAgain, refusedErr = r.refusedPods(ctx, observed, *o)
	return result.ShortestDelay(again, routerAgain, refusedAgain), errors.Join(mountsErr, refusedErr)
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

// pollDelay returns the polling delay for state that no watch reports: the progress of a download, the ranks in an InferencePool, a missing kind
// that the spec needs, traffic, and user-provided ConfigMaps. It returns zero if nothing needs polling.
func pollDelay(moed *semmoev1.MoEDeployment, o observation) time.Duration {
	var pool, groups, polling, hardware, downloads time.Duration
	if o.Download.Running != nil {
		downloads = downloadPeriod
	}
	if machines := moed.Spec.Placement.Hardware; machines != nil && machines.ConfigMap != nil {
		hardware = planner.HardwarePeriod
	}
	if moed.Spec.Routing.Mode == semmoev1.RoutingModeEndpointPicker {
		pool = front.PoolPeriod
	}
	if o.Invalid != nil && o.Invalid.Reason == revisions.ReasonNoGroups {
		groups = groupKindPeriod
	}
	if decision.PollsRouters(moed, o.ServingRevision(), o.ServingPlanning()) || moed.Spec.Drift.Source == semmoev1.DriftSourcePrometheus && o.ServingRevision() != "" {
		polling = observePeriod
	}
	return result.ShortestDelay(pool, groups, polling, hardware, downloads)
}

// plans returns the reader of profiles, plans and tables.
func (r *Reconciler) plans() *plans.Reader {
	return &plans.Reader{Client: r.Client, Live: r.Live, HTTP: r.HTTP}
}

// writer returns the writer of decisions.
func (r *Reconciler) writer() childobjects.Writer {
	return childobjects.Writer{Client: r.Client, Live: r.Live, Recorder: r.Recorder}
}

// front returns the Front, which manages the objects in front of the engines.
func (r *Reconciler) front() *front.Front {
	return &front.Front{Client: r.Client, Live: r.Live, Store: r.Store, Image: r.Image, PullPolicy: r.PullPolicy, Namespace: r.Namespace, ManagerAuthority: r.Routers.Authority}
}

// nextInspection returns the constructor of an inspection Job per attempt, or nil while the spec is paused.
func (r *Reconciler) nextInspection(moed *semmoev1.MoEDeployment) func(attempt int) *batchv1.Job {
	if desired.Paused(moed) {
		return nil
	}
	return func(attempt int) *batchv1.Job { return inspectionJob(moed, r.Image, r.PullPolicy, attempt) }
}

// nextDownload returns the constructor of a download Job per attempt, or nil while the spec is paused or invalid.
func (r *Reconciler) nextDownload(s *decision.Snapshot) func(attempt int) *batchv1.Job {
	if desired.Paused(s.Moed) || decision.Invalid(s) != nil {
		return nil
	}
	return func(attempt int) *batchv1.Job { return download.Job(s.Moed, r.Image, r.PullPolicy, attempt) }
}

// explainImageVolumes adds the cause to the error of an API server that drops the image of a volume, because it has no image
// volumes: the volume then has no source.
func explainImageVolumes(moed *semmoev1.MoEDeployment, err error) error {
	if !apierrors.IsInvalid(err) || moed.Spec.Model.ModelVolume().Image == nil || !strings.Contains(err.Error(), "must specify a volume type") {
		return err
	}
	return fmt.Errorf("the cluster has no image volumes, which the model needs: use Kubernetes 1.35, or 1.33 with the feature gate ImageVolume: %w", err)
}

// refusedPods returns why the pods of a workload, of the download or of the inspection cannot be created, for example a quota or the pod
// security standard of the namespace. In this case no pod exists that could report the cause. While pods are missing, it
// returns the delay until their events are read again.
func (r *Reconciler) refusedPods(ctx context.Context, observed *decision.Snapshot, o observation) (*podhealth.Problem, time.Duration, error) {
	var owners []client.Object
	for _, workload := range observed.Workloads {
		if state := revisions.StateOf(workload, o.Pods, o.Workers); workload.UID != "" && state.Existing < state.Replicas {
			owners = append(owners, workload.Object)
		}
		for _, name := range revisions.GroupsLackingPods(workload, o.Pods, observed.Workers) {
			group := &appsv1.StatefulSet{}
			err := r.Live.Get(ctx, client.ObjectKey{Namespace: workload.Namespace, Name: name}, group)
			if err == nil {
				owners = append(owners, group)
			} else if !apierrors.IsNotFound(err) {
				return nil, 0, fmt.Errorf("failed to read StatefulSet %s: %w", name, err)
			}
		}
	}
	for _, job := range []*batchv1.Job{o.Inspection.Running, o.Download.Running} {
		if job != nil && job.Status.Active == 0 && !ptr.Deref(job.Spec.Suspend, false) {
			owners = append(owners, job)
		}
	}
	for _, owner := range owners {
		message, err := lookup.LastEvent(ctx, r.Live, owner, "FailedCreate", observed.Now)
		if err != nil {
			return nil, 0, err
		}
		if message != "" {
			return podhealth.PodsRejected(message), lookup.EventsPeriod, nil
		}
	}
	if len(owners) == 0 {
		return nil, 0, nil // all pods exist
	}
	return nil, lookup.EventsPeriod, nil
}
