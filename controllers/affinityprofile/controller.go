package affinityprofile

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/inspection"
	"github.com/semmoe/operator/internal/laststatus"
	"github.com/semmoe/operator/internal/outcome"
	"github.com/semmoe/operator/internal/owned"
	"github.com/semmoe/operator/internal/podhealth"
	recording "github.com/semmoe/operator/internal/profile"
	"github.com/semmoe/operator/internal/router/managerauth"
)

// +kubebuilder:rbac:groups=semmoe.io,resources=affinityprofiles;moedeployments,verbs=list;watch
// +kubebuilder:rbac:groups=semmoe.io,resources=affinityprofiles/status,verbs=patch
// +kubebuilder:rbac:groups=semmoe.io,resources=affinityprofiles/finalizers,verbs=update
// +kubebuilder:rbac:groups=batch,resources=jobs,verbs=list;watch;create;patch;delete
// +kubebuilder:rbac:groups=core,resources=pods;services,verbs=list;watch
// +kubebuilder:rbac:groups=core,resources=events,verbs=list
// +kubebuilder:rbac:groups=core,resources=configmaps,verbs=get
// +kubebuilder:rbac:groups=events.k8s.io,resources=events,verbs=create;patch

// Reconciler makes profiles.
type Reconciler struct {
	client.Client
	// Events reads events past the cache: they are only needed for a pod whose volumes cannot be mounted.
	Events client.Reader
	// Recorder tells transitions.
	Recorder events.EventRecorder
	// HTTP asks profiling Jobs how far they are.
	HTTP *http.Client
	// Routers is the identity with which live samples are read from request routers.
	Routers managerauth.Identity
	// Store is how the artifact store is reached.
	Store *access.Access
	// Image is the image of our own containers.
	Image string
	// PullPolicy is when nodes pull it; empty leaves that to the API server.
	PullPolicy corev1.PullPolicy
	// Now is the clock.
	Now func() time.Time

	// collecting is held while the samples of request routers are in memory.
	collecting sync.Mutex
	statuses   laststatus.Memory[semmoev1.AffinityProfileStatus]
}

// SetupWithManager registers the controller.
func (r *Reconciler) SetupWithManager(m ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(m).
		Named("affinityprofile").
		// Without a predicate: a status that somebody wiped is written again.
		For(&semmoev1.AffinityProfile{}).
		Owns(&batchv1.Job{}).
		// Pods belong to Jobs, not to us: their label leads back.
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, pod client.Object) []reconcile.Request {
			name := pod.GetLabels()[semmoev1.LabelProfile]
			if name == "" {
				return nil
			}
			return []reconcile.Request{{NamespacedName: types.NamespacedName{Namespace: pod.GetNamespace(), Name: name}}}
		})).
		Watches(&semmoev1.MoEDeployment{}, handler.EnqueueRequestsFromMapFunc(r.profilesOf)).
		WithOptions(controller.Options{MaxConcurrentReconciles: 4, ReconciliationTimeout: time.Minute}).
		Complete(r)
}

// profilesOf are the profiles that are taken through a deployment, or belong to it.
func (r *Reconciler) profilesOf(ctx context.Context, moed client.Object) []reconcile.Request {
	var profiles semmoev1.AffinityProfileList
	if err := r.List(ctx, &profiles, client.InNamespace(moed.GetNamespace()), client.UnsafeDisableDeepCopy); err != nil {
		return nil // the cache is not there yet, and will report the profiles themselves
	}
	var requests []reconcile.Request
	for i := range profiles.Items {
		profile := &profiles.Items[i]
		if ref := profile.Spec.DeploymentRef; ref != nil && ref.Name == moed.GetName() || metav1.IsControlledBy(profile, moed) {
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(profile)})
		}
	}
	return requests
}

// Reconcile observes, acts on what it observed, and reports.
func (r *Reconciler) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	profile := &semmoev1.AffinityProfile{}
	err := r.Get(ctx, request.NamespacedName, profile)
	if err != nil || profile.DeletionTimestamp != nil {
		if err == nil || apierrors.IsNotFound(err) {
			r.statuses.Forget(request.NamespacedName) // the Jobs are garbage-collected by their owner references
		}
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	profile.Status = r.statuses.Latest(profile, profile.Status)
	if profile.Spec.Target == semmoev1.ProfilingTargetLive {
		return r.reconcileLive(ctx, profile)
	}
	now := r.Now()
	o, pods, err := r.observe(ctx, profile, now)
	if err != nil {
		return ctrl.Result{}, err
	}
	after, inspectErr := inspection.Reconcile(ctx, r.Client, manager, o.Inspection, r.nextInspection(profile, o), now)
	do := decide(o, now)
	phases := errors.Join(inspectErr, r.act(ctx, profile, o, do))
	o.Failure = outcome.Lasting(phases)
	after = outcome.Soonest(after, do.After)

	failedMounts, err := podhealth.FailedMounts(ctx, r.Events, pods, now)
	phases = errors.Join(phases, err)
	problem, again := podhealth.Find(pods, failedMounts, now)
	if problem == nil {
		problem, err = r.refusedPods(ctx, o, now)
		phases = errors.Join(phases, err)
	}
	o.Problem = problem
	after = outcome.Soonest(after, again)
	phases = errors.Join(phases, r.applyStatus(ctx, profile, statusOf(profile, o, now)))
	return ctrl.Result{RequeueAfter: after}, phases
}

// observe reads everything that is decided from, and the pods whose problems count.
func (r *Reconciler) observe(ctx context.Context, profile *semmoev1.AffinityProfile, now time.Time) (observation, []*corev1.Pod, error) {
	o := observation{Invalid: validate(profile)}
	jobs, pods, err := r.list(ctx, profile.Namespace, client.MatchingLabels{semmoev1.LabelProfile: profile.Name, semmoev1.LabelComponent: semmoev1.ComponentInspect})
	if err != nil {
		return o, nil, err
	}
	jobs = slices.DeleteFunc(jobs, func(job *batchv1.Job) bool { return !metav1.IsControlledBy(job, profile) })
	o.Inspection = inspection.Observe(inputsOf(profile).Hash(), jobs, pods)
	report, dataset := o.Inspection.Report, o.Inspection.Dataset
	if report == nil || dataset == nil || o.Invalid != nil {
		return o, pods, nil
	}
	if profile.Spec.Target == semmoev1.ProfilingTargetDedicated {
		if err := report.CheckExpertParallelSize(int(profile.Spec.Parallelism.ExpertParallelSize)); err != nil {
			o.Invalid = invalidf("InvalidExpertParallelSize", "spec.parallelism.expertParallelSize: %v", err)
			return o, pods, nil
		}
	}
	o.ID = recording.ID(report.ModelDigest, dataset.Digest, samplingOf(profile))
	// The Jobs are read before the store is asked: of a Job that is seen as complete, the result is there.
	jobs, pods, err = r.list(ctx, profile.Namespace, client.MatchingLabels{semmoev1.LabelInputs: o.ID, semmoev1.LabelComponent: semmoev1.ComponentProfile})
	if err != nil {
		return o, nil, err
	}
	o.Attempts = attemptsOf(profile, jobs, pods)
	if inspected := o.Inspection.Recorded; inspectionOutdated(inspected, o.Attempts) {
		o.Inspection.Obsolete = append(o.Inspection.Obsolete, inspected)
	}
	if o.Result, err = r.findResult(ctx, profile, o.ID); err != nil {
		o.StoreFailure = storeAdvice(err)
		if profile.Status.Inputs == o.ID {
			o.Result = profile.Status.Result
		}
	}
	if o.Result != nil {
		return o, nil, nil
	}
	if err = r.observeDeployment(ctx, profile, report.ModelDigest, &o); err != nil {
		return o, nil, err
	}
	running := o.Attempts.Running
	pods = slices.DeleteFunc(pods, func(pod *corev1.Pod) bool { return running == nil || !metav1.IsControlledBy(pod, running) })
	if o.Attempts.Ours {
		o.Progress = r.observeProgress(ctx, profile, pods, now)
	}
	return o, pods, nil
}

// observeDeployment adds why the profile's deployment keeps it from being taken now, and why a Job that is taking it must not go on; nothing
// where it does not, or there is none.
func (r *Reconciler) observeDeployment(ctx context.Context, profile *semmoev1.AffinityProfile, modelDigest string, o *observation) error {
	name := ""
	owner, ref := metav1.GetControllerOf(profile), profile.Spec.DeploymentRef
	switch serving := profile.Spec.Target == semmoev1.ProfilingTargetServing; {
	case serving && ref != nil:
		name = ref.Name
	case !serving && owner != nil && owner.Kind == "MoEDeployment":
		name = owner.Name
	default:
		return nil
	}
	moed := &semmoev1.MoEDeployment{}
	err := r.Get(ctx, client.ObjectKey{Namespace: profile.Namespace, Name: name}, moed)
	if apierrors.IsNotFound(err) {
		o.Deployment = waitsFor(profile.Spec.Target, name, nil, modelDigest)
		return nil
	}
	if err != nil {
		return fmt.Errorf("get MoEDeployment %s: %w", name, err)
	}
	if profile.Spec.Target == semmoev1.ProfilingTargetServing {
		if o.Spoiled, o.Unseen, err = r.spoiled(ctx, moed, modelDigest); err != nil {
			return err
		}
	}
	o.Deployment = cmp.Or(o.Spoiled, waitsFor(profile.Spec.Target, name, moed, modelDigest))
	return nil
}

// spoiled is why what a deployment answers now would be no profile of the model, in a run that has begun just as in one to begin; empty
// where it would. That replicas are of several revisions does not matter here: of one model they all choose the same experts. A deployment's
// status tells that the model has changed; of its Service, and when the last of its engines goes, no event may be ours.
func (r *Reconciler) spoiled(ctx context.Context, moed *semmoev1.MoEDeployment, modelDigest string) (why string, unseen bool, err error) {
	if model := moed.Status.Model; model != nil && model.Digest != modelDigest {
		return otherModel(moed.Name, modelDigest), false, nil
	}
	service := &corev1.Service{}
	if err := r.Get(ctx, client.ObjectKeyFromObject(moed), service); client.IgnoreNotFound(err) != nil {
		return "", false, fmt.Errorf("get Service %s: %w", moed.Name, err)
	}
	if !metav1.IsControlledBy(service, moed) { // the cache has the operator's own alone: there may be one of somebody else's
		return fmt.Sprintf("MoEDeployment %s has no Service %s of its own, to which requests could be sent", moed.Name, moed.Name), true, nil
	}
	if !leadsToEngines(moed, service) {
		return "", false, nil
	}
	var pods corev1.PodList
	err = r.List(ctx, &pods, client.InNamespace(moed.Namespace), client.UnsafeDisableDeepCopy,
		client.MatchingLabels{semmoev1.LabelDeployment: moed.Name, semmoev1.LabelComponent: semmoev1.ComponentEngine})
	if err != nil {
		return "", false, fmt.Errorf("list the engines of MoEDeployment %s: %w", moed.Name, err)
	}
	if !slices.ContainsFunc(pods.Items, permuted) {
		return "", false, nil
	}
	return fmt.Sprintf("the Service of MoEDeployment %s leads to engines of reshuffled weights, which tell experts by other numbers than the model's: spec.routing.mode Router has them translated, and a profile of target Dedicated needs none of them", moed.Name), true, nil
}

// leadsToEngines tells that requests to a deployment's Service reach engines without the request router, which alone translates the
// numbers of their experts, or will once the latest spec is met.
func leadsToEngines(moed *semmoev1.MoEDeployment, service *corev1.Service) bool {
	return moed.Spec.Routing.Mode != semmoev1.RoutingModeRouter || service.Spec.Selector[semmoev1.LabelComponent] == semmoev1.ComponentEngine
}

func permuted(pod corev1.Pod) bool {
	return semmoev1.Realization(pod.Annotations[semmoev1.AnnotationRealization]) == semmoev1.RealizationReshuffledWeights
}

// list returns the Jobs and pods with these labels.
func (r *Reconciler) list(ctx context.Context, namespace string, with client.MatchingLabels) ([]*batchv1.Job, []*corev1.Pod, error) {
	var jobList batchv1.JobList
	var podList corev1.PodList
	if err := errors.Join(r.List(ctx, &jobList, client.InNamespace(namespace), with), r.List(ctx, &podList, client.InNamespace(namespace), with)); err != nil {
		return nil, nil, fmt.Errorf("list Jobs and their pods: %w", err)
	}
	jobs, pods := make([]*batchv1.Job, len(jobList.Items)), make([]*corev1.Pod, len(podList.Items))
	for i := range jobList.Items {
		jobs[i] = &jobList.Items[i]
	}
	for i := range podList.Items {
		pods[i] = &podList.Items[i]
	}
	return jobs, pods, nil
}

func inputsOf(profile *semmoev1.AffinityProfile) inspection.Inputs {
	inputs := inspection.InputsOf(profile.Spec.Model, profile.Spec.Template)
	inputs.Dataset = profile.Spec.Dataset
	return inputs
}

// nextInspection makes the Job of an attempt; nil where a fault of the spec makes it useless.
func (r *Reconciler) nextInspection(profile *semmoev1.AffinityProfile, o observation) func(attempt int) *batchv1.Job {
	if o.Invalid != nil {
		return nil
	}
	inputs := inputsOf(profile)
	return func(attempt int) *batchv1.Job {
		return inspection.Job(profile.Namespace, inspectPrefix(profile), owned.ControllerReference(profile, "AffinityProfile"),
			labelsOf(profile, semmoev1.ComponentInspect, semmoev1.LabelInputs, inputs.Hash()), inputs, r.Image, r.PullPolicy, attempt)
	}
}

// act does what was decided.
func (r *Reconciler) act(ctx context.Context, profile *semmoev1.AffinityProfile, o observation, do action) error {
	for _, job := range o.Attempts.Obsolete {
		err := r.Delete(ctx, job, client.Preconditions{UID: &job.UID}, client.PropagationPolicy(metav1.DeletePropagationBackground))
		if client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("delete profiling Job %s: %w", job.Name, err)
		}
	}
	switch {
	case do.Stop != nil:
		return r.end(ctx, do.Stop, annotationStopped, o.Spoiled)
	case do.End != nil:
		return r.end(ctx, do.End, annotationFailure, o.Attempts.Crash)
	}
	if do.Create == 0 {
		return nil
	}
	authority, err := r.Store.Authority(ctx)
	if err != nil {
		return err
	}
	job, err := render(profile, target{
		ID: o.ID, ModelDigest: o.Inspection.Report.ModelDigest, DatasetDigest: o.Inspection.Dataset.Digest,
		Image: r.Image, PullPolicy: r.PullPolicy, Store: r.Store.Env(authority),
	}, do.Create)
	if err != nil {
		return err
	}
	// One of that name exists where the cache is behind, or while its predecessor is being deleted: its events follow.
	if err := r.Create(ctx, job, client.FieldOwner(manager)); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("create profiling Job: %w", err)
	}
	return nil
}

// end ends a Job whose engine is dead, or whose deployment has changed, and lets it keep the reason: its pods go. A sidecar is
// restarted for ever, and the profiling container cannot tell an engine that loads its model from one that is gone.
func (r *Reconciler) end(ctx context.Context, job *batchv1.Job, annotation, why string) error {
	if job.Annotations[annotationFailure] != "" || job.Annotations[annotationStopped] != "" {
		return nil // it is ending
	}
	base := job.DeepCopy()
	metav1.SetMetaDataAnnotation(&job.ObjectMeta, annotation, why)
	job.Spec.ActiveDeadlineSeconds = ptr.To[int64](1)
	if err := r.Patch(ctx, job, client.MergeFrom(base), client.FieldOwner(manager)); err != nil {
		return fmt.Errorf("end profiling Job %s: %w", job.Name, err)
	}
	return nil
}

// refusedPods reads why the pods of a Job cannot be created: a quota, or the pod security standard of the namespace. No
// pod exists then that could tell.
func (r *Reconciler) refusedPods(ctx context.Context, o observation, now time.Time) (*podhealth.Problem, error) {
	for _, job := range []*batchv1.Job{o.Inspection.Running, o.Attempts.Running} {
		if job == nil || job.Status.Active > 0 {
			continue
		}
		message, err := podhealth.LastEvent(ctx, r.Events, job, "FailedCreate", now)
		if err != nil {
			return nil, err
		}
		if message != "" {
			return podhealth.PodsRejected(message), nil
		}
	}
	return nil, nil
}
