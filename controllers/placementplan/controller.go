// SPDX-License-Identifier: Apache-2.0

package placementplan

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	controllerruntime "sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/calibration"
	"github.com/semmoe/operator/internal/calibration/machines"
	"github.com/semmoe/operator/internal/kube/conditions"
	"github.com/semmoe/operator/internal/kube/lookup"
	"github.com/semmoe/operator/internal/kube/statuscache"
	"github.com/semmoe/operator/internal/plan/bundle"
)

// +kubebuilder:rbac:groups=semmoe.io,resources=placementplans,verbs=list;watch
// +kubebuilder:rbac:groups=semmoe.io,resources=placementplans/status,verbs=patch
// +kubebuilder:rbac:groups=semmoe.io,resources=placementplans/finalizers,verbs=update
// +kubebuilder:rbac:groups=semmoe.io,resources=affinityprofiles,verbs=get;list;watch
// +kubebuilder:rbac:groups=core,resources=configmaps,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups=events.k8s.io,resources=events,verbs=create;patch

const (
	// storeRetry is the interval at which an unavailable store is retried.
	storeRetry = 10 * time.Second
	// checkPeriod is the interval at which a published plan is verified in the store.
	checkPeriod = 10 * time.Minute
	// hardwareRetry is the interval at which an invalid hardware profile is read again. ConfigMaps of users are not
	// watched.
	hardwareRetry = 30 * time.Second
)

// Reconciler solves and publishes PlacementPlans.
type Reconciler struct {
	client.Client
	// Live reads without the cache. It finds objects that the cache does not contain, or not yet.
	Live client.Reader
	// Recorder records condition transitions as events.
	Recorder events.EventRecorder
	// Store contains the profiles and the published plans.
	Store *access.Access
	// Workers is the number of plans that are solved concurrently, at least one. Each holds a routing trace in memory.
	Workers int
	// Now returns the current time.
	Now func() time.Time

	jobs     *jobs
	statuses statuscache.Memory[semmoev1.PlacementPlanStatus]
}

// SetupWithManager registers the controller and its jobs. The jobs stop with the manager.
func (r *Reconciler) SetupWithManager(m ctrl.Manager) error {
	r.jobs = newJobs(r.Workers, r.Now)
	if err := m.Add(controllerruntime.RunnableFunc(r.jobs.Start)); err != nil {
		return err
	}
	return ctrl.NewControllerManagedBy(m).
		Named("placementplan").
		For(&semmoev1.PlacementPlan{}, builder.WithPredicates(predicate.Or[client.Object](predicate.GenerationChangedPredicate{}, predicate.NewPredicateFuncs(r.statusChanged)))).
		Owns(&corev1.ConfigMap{}).
		Watches(&corev1.ConfigMap{}, handler.EnqueueRequestsFromMapFunc(planOf)).
		Watches(&semmoev1.AffinityProfile{}, handler.EnqueueRequestsFromMapFunc(r.plansOf)).
		WatchesRawSource(source.Channel(r.jobs.changed, &handler.EnqueueRequestForObject{})).
		WithOptions(controller.Options{MaxConcurrentReconciles: 2, ReconciliationTimeout: time.Minute}).
		Complete(r)
}

// statusChanged reports whether another client changed the status. Without this event the controller would not restore
// the status soon.
func (r *Reconciler) statusChanged(object client.Object) bool {
	plan, ok := object.(*semmoev1.PlacementPlan)
	return ok && r.statuses.Foreign(plan, plan.Status)
}

// planOf maps a ConfigMap without a controller to the plan in its label. Such a ConfigMap exists, for example, when it
// was restored from a backup after its plan.
func planOf(_ context.Context, configMap client.Object) []reconcile.Request {
	name := configMap.GetLabels()[semmoev1.LabelPlan]
	if name == "" || metav1.GetControllerOf(configMap) != nil {
		return nil
	}
	return []reconcile.Request{{NamespacedName: client.ObjectKey{Namespace: configMap.GetNamespace(), Name: name}}}
}

// plansOf maps a profile to the plans that are made from it.
func (r *Reconciler) plansOf(ctx context.Context, profile client.Object) []reconcile.Request {
	var plans semmoev1.PlacementPlanList
	if err := r.List(ctx, &plans, client.InNamespace(profile.GetNamespace()), client.UnsafeDisableDeepCopy); err != nil {
		logr.FromContextOrDiscard(ctx).Error(err, "Failed to list the plans of a profile", "profile", profile.GetName())
		return nil
	}
	var requests []reconcile.Request
	for i := range plans.Items {
		spec := plans.Items[i].Spec
		if spec.ProfileRef.Name == profile.GetName() || spec.PriorProfileRef != nil && spec.PriorProfileRef.Name == profile.GetName() {
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&plans.Items[i])})
		}
	}
	return requests
}

// Reconcile observes the objects and the store, decides, acts, and reports the status.
func (r *Reconciler) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	plan := &semmoev1.PlacementPlan{}
	err := r.Get(ctx, request.NamespacedName, plan)
	if err != nil || plan.DeletionTimestamp != nil {
		if err == nil || apierrors.IsNotFound(err) {
			r.jobs.Cancel(request.NamespacedName) // the ConfigMap is garbage-collected by its owner reference
			r.statuses.Forget(request.NamespacedName)
		}
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	plan.Status = r.statuses.Latest(plan, plan.Status)
	observed, err := r.observe(ctx, plan)
	if err != nil {
		return ctrl.Result{}, err
	}
	switch adopted, err := r.adopt(ctx, plan, observed.ConfigMaps); {
	case apierrors.IsForbidden(err), apierrors.IsInvalid(err):
		observed.Fault = &conditions.Fault{Reason: "ReconcileFailed", Message: err.Error()} // a retry may not resolve it
		return ctrl.Result{}, errors.Join(err, r.applyStatus(ctx, plan, statusOf(plan, observed, r.Now())))
	case adopted, err != nil:
		return ctrl.Result{}, err // its event triggers the next reconciliation
	}
	r.observeStore(ctx, plan, &observed)
	after, err := r.act(ctx, plan, &observed, decide(plan, observed))
	return ctrl.Result{RequeueAfter: after}, errors.Join(err, r.applyStatus(ctx, plan, statusOf(plan, observed, r.Now())))
}

// observation is the input of the decision and of the status.
type observation struct {
	// Profile is the profile that the plan is made from; nil if it does not exist.
	Profile *semmoev1.AffinityProfile
	// Prior is the profile of the plan in service; nil if the spec names none, or it does not exist.
	Prior *semmoev1.AffinityProfile
	// Machines is the hardware profile that the plan names. MachinesFault is the error if it could not be read.
	Machines      machines.ResolvedProfile
	MachinesFault *machines.ProfileError
	// ConfigMaps are the ConfigMaps with the label of the plan, by name.
	ConfigMaps map[string]*corev1.ConfigMap
	// Inputs are the inputs of the plan; nil while the profile has no result.
	Inputs *solveInputs
	// Store is the client of the artifact store. StoreFailure is the error of a query; nil if it succeeded.
	Store        *access.Client
	StoreFailure error
	// Solved is the plan that was solved from the inputs; nil if none was solved.
	Solved *solved
	// Published is true if the plan's ConfigMap exists.
	Published bool
	// Stable is the plan in the ConfigMap with the stable name; nil if that ConfigMap does not exist.
	Stable *solved
	// Solving is the progress of the job; nil if no job is running.
	Solving *progress
	// Fault is the current error; nil without error.
	Fault *conditions.Fault
}

// observe reads the profile and the ConfigMaps.
func (r *Reconciler) observe(ctx context.Context, plan *semmoev1.PlacementPlan) (observation, error) {
	o := observation{ConfigMaps: map[string]*corev1.ConfigMap{}}
	var err error
	if o.Profile, err = r.profile(ctx, plan.Namespace, plan.Spec.ProfileRef.Name); err != nil {
		return o, err
	}
	if ref := plan.Spec.PriorProfileRef; ref != nil {
		if o.Prior, err = r.profile(ctx, plan.Namespace, ref.Name); err != nil {
			return o, err
		}
	}
	var configMaps corev1.ConfigMapList
	if err := r.List(ctx, &configMaps, client.InNamespace(plan.Namespace), client.MatchingLabels{semmoev1.LabelPlan: plan.Name}); err != nil {
		return o, fmt.Errorf("failed to list ConfigMaps: %w", err)
	}
	for i := range configMaps.Items {
		o.ConfigMaps[configMaps.Items[i].Name] = &configMaps.Items[i]
	}
	if stable := o.ConfigMaps[stableConfigMapName(plan)]; stable != nil && metav1.IsControlledBy(stable, plan) {
		o.Stable = solvedOf(stable)
	}
	o.Machines, err = calibration.ReadProfile(ctx, r.Live, plan.Namespace, plan.Spec.Hardware)
	if o.MachinesFault = machines.AsProfileError(err); err != nil && o.MachinesFault == nil {
		return o, err
	}
	o.Inputs = inputsOf(plan, o.Profile, o.Prior, o.Machines)
	return o, nil
}

// profile reads an AffinityProfile. It returns nil if the profile does not exist.
func (r *Reconciler) profile(ctx context.Context, namespace, name string) (*semmoev1.AffinityProfile, error) {
	profile := &semmoev1.AffinityProfile{}
	found, err := lookup.Find(ctx, r.Client, r.Live, client.ObjectKey{Namespace: namespace, Name: name}, profile)
	if err != nil {
		return nil, fmt.Errorf("failed to get AffinityProfile %s: %w", name, err)
	}
	if !found {
		return nil, nil
	}
	return profile, nil
}

// observeStore searches the store for the plan.
func (r *Reconciler) observeStore(ctx context.Context, plan *semmoev1.PlacementPlan, o *observation) {
	if o.Store, o.StoreFailure = r.Store.Client(ctx); o.StoreFailure == nil {
		o.StoreFailure = r.find(ctx, o.Store, plan, o)
	}
}

// act executes an action and completes the observation. It returns the delay of the next reconciliation, and only
// errors that a retry can resolve.
func (r *Reconciler) act(ctx context.Context, plan *semmoev1.PlacementPlan, o *observation, do action) (time.Duration, error) {
	o.Fault = do.Fault
	if do.Cancel {
		r.jobs.Cancel(client.ObjectKeyFromObject(plan))
	}
	after := do.After
	switch {
	case do.Publish:
		return r.publish(ctx, o.Store, plan, o)
	case do.Solve:
		after = r.solve(ctx, plan, o)
	}
	o.recall(plan)
	switch {
	case o.StoreFailure != nil && o.Solved == nil:
		o.Solved = fromStatus(plan)
	case o.Published && o.Fault == nil:
		o.Fault = &conditions.Fault{Reason: "ArtifactsLost", Message: "The artifact store has lost files of the plan, so new request routers cannot load its tables. The plan is solved again from its profile"}
		return cmp.Or(after, checkPeriod), nil
	}
	return after, nil
}

// publish creates the ConfigMaps of a solved plan.
func (r *Reconciler) publish(ctx context.Context, store *access.Client, plan *semmoev1.PlacementPlan, o *observation) (time.Duration, error) {
	layout := func() (map[string]string, error) {
		layout, err := bundle.FetchLayout(ctx, store, plan.Namespace, o.Solved.PlanDigest)
		if err != nil {
			return nil, &storeError{err}
		}
		return dataOf(layout, plan.Spec.Engine)
	}
	name := configMapName(plan, o.Solved.PlanDigest)
	var err error
	stable := true
	if o.Published, err = r.ensureConfigMap(ctx, plan, name, o.ConfigMaps[name], o.Solved, layout); o.Published && isStandalone(plan) {
		// The ConfigMap with the stable name never changes. If it contains another plan, a fault is reported below.
		name := stableConfigMapName(plan)
		if stable, err = r.ensureConfigMap(ctx, plan, name, o.ConfigMaps[name], o.Solved, layout); stable && o.Stable == nil {
			o.Stable = o.Solved
		}
	}
	var conflict *conflictError
	var unavailable *storeError
	var invalid *invalidError
	switch {
	case errors.As(err, &conflict):
		o.Fault = &conditions.Fault{Reason: "ConfigMapConflict", Message: conflict.message}
		return storeRetry, nil
	case errors.As(err, &unavailable):
		o.Fault = storeFault(err)
		return storeRetry, nil
	case errors.As(err, &invalid):
		o.Fault = faultOf(err)
		return 0, nil
	case err != nil && (apierrors.IsForbidden(err) || apierrors.IsInvalid(err)):
		o.Fault = &conditions.Fault{Reason: "ReconcileFailed", Message: err.Error()} // a retry may not resolve it
		return 0, err
	case err != nil:
		return 0, err
	case !o.Published || !stable:
		return storeRetry, nil
	case o.Stable != nil && o.Stable.PlanDigest != o.Solved.PlanDigest:
		o.Fault = &conditions.Fault{Reason: "StableConfigMapOutdated", Message: fmt.Sprintf("ConfigMap %s contains plan %s, which the artifact store lost; plan %s was solved instead. Stop the workloads that mount the ConfigMap, and delete it: it is created again", stableConfigMapName(plan),
			artifact.Digest(o.Stable.PlanDigest).Short(), artifact.Digest(o.Solved.PlanDigest).Short())}
	}
	return checkPeriod, nil
}

// storeError marks an error of the artifact store.
type storeError struct{ error }

func (e *storeError) Unwrap() error { return e.error }

// find searches the store for the plan. It searches for three plans, in this order: the plan in the ConfigMap, which
// also remains if the profile has another result now; the solution of the inputs; and the plan in the status.
func (r *Reconciler) find(ctx context.Context, store *access.Client, plan *semmoev1.PlacementPlan, o *observation) error {
	searches := []func() (*solved, error){
		func() (*solved, error) { return o.fromConfigMap(plan), nil },
		func() (*solved, error) {
			if o.Inputs == nil {
				return nil, nil
			}
			found, err := fetchSolution(ctx, store, plan.Namespace, o.Inputs.ID())
			return found.solved(), err
		},
		func() (*solved, error) { return fromStatus(plan), nil },
	}
	for _, search := range searches {
		found, err := search()
		if err != nil {
			return err
		}
		if found == nil {
			continue
		}
		complete, err := bundle.Complete(ctx, store, plan.Namespace, found.PlanDigest)
		if err != nil {
			return err
		}
		if complete {
			o.Solved = found
			return nil
		}
	}
	return nil
}

// recall restores Solved and Published from the ConfigMap when the store does not contain the plan. A published plan
// stays published while its ConfigMap exists, because engines may serve it.
func (o *observation) recall(plan *semmoev1.PlacementPlan) {
	o.Solved = o.fromConfigMap(plan)
	o.Published = o.Solved != nil
}

// fromConfigMap returns the plan in the newest of its ConfigMaps, or nil without one. There are several ConfigMaps if
// the plan was lost and solved again. The ConfigMap with the stable name is ignored, because it is a copy that may be
// older.
func (o *observation) fromConfigMap(plan *semmoev1.PlacementPlan) *solved {
	var youngest *corev1.ConfigMap
	for _, candidate := range o.ConfigMaps {
		if candidate.Name == stableConfigMapName(plan) || candidate.DeletionTimestamp != nil || !metav1.IsControlledBy(candidate, plan) || solvedOf(candidate) == nil {
			continue
		}
		if youngest == nil || cmp.Or(candidate.CreationTimestamp.Compare(youngest.CreationTimestamp.Time), cmp.Compare(candidate.Name, youngest.Name)) > 0 {
			youngest = candidate
		}
	}
	if youngest == nil {
		return nil
	}
	return solvedOf(youngest)
}

// fromStatus returns the plan that the status contains, or nil.
func fromStatus(plan *semmoev1.PlacementPlan) *solved {
	if plan.Status.PlanDigest == "" || plan.Status.Verdict == "" {
		return nil
	}
	return &solved{
		PlanDigest: plan.Status.PlanDigest, ModelDigest: plan.Status.ModelDigest, Verdict: plan.Status.Verdict, Forecast: plan.Status.Forecast,
		Tier: plan.Status.Tier, Comparison: plan.Status.Comparison,
	}
}

// solve starts or continues the job of the plan. It returns the delay of the next reconciliation.
func (r *Reconciler) solve(ctx context.Context, plan *semmoev1.PlacementPlan, o *observation) time.Duration {
	t := &task{
		client: o.Store, engine: plan.Spec.Engine, inputs: *o.Inputs, machines: o.Machines.Profile, now: r.Now, memory: memoryShare(r.Workers),
		scope: artifact.Scope{Namespace: plan.Namespace, Kind: artifact.Profile, ID: o.Profile.Status.Inputs},
	}
	if o.Prior != nil {
		t.prior = artifact.Scope{Namespace: plan.Namespace, Kind: artifact.Profile, ID: o.Prior.Status.Inputs}
	}
	log := logr.FromContextOrDiscard(ctx)
	state, failed := r.jobs.Ensure(client.ObjectKeyFromObject(plan), o.Inputs.ID(), func(ctx context.Context, report func(step string, done, total int)) error {
		return t.run(logr.NewContext(ctx, log), report)
	})
	if failed == nil {
		o.Solving = &state
		return progressPeriod
	}
	o.Fault = faultOf(failed.Err)
	if failed.Invalid {
		return 0
	}
	return max(time.Second, failed.RetryAt.Sub(r.Now()))
}
