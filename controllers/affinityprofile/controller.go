// SPDX-License-Identifier: Apache-2.0

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
	"github.com/semmoe/operator/internal/kube/apply"
	"github.com/semmoe/operator/internal/kube/lookup"
	"github.com/semmoe/operator/internal/kube/ownership"
	"github.com/semmoe/operator/internal/kube/podhealth"
	"github.com/semmoe/operator/internal/kube/result"
	"github.com/semmoe/operator/internal/kube/statuscache"
	"github.com/semmoe/operator/internal/kube/writes"
	recording "github.com/semmoe/operator/internal/profile"
	"github.com/semmoe/operator/internal/profile/inspection"
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

// Reconciler makes AffinityProfiles.
type Reconciler struct {
	client.Client
	// Events reads events without the cache. They are only needed for pods whose volumes cannot be mounted and for Jobs
	// whose pods cannot be created.
	Events client.Reader
	// Recorder records condition transitions as events.
	Recorder events.EventRecorder
	// HTTP requests the progress of profiling Jobs.
	HTTP *http.Client
	// Routers is the identity with which live samples are read from request routers.
	Routers managerauth.Identity
	// Store provides access to the artifact store.
	Store *access.Access
	// Image is the image of the operator's containers.
	Image string
	// PullPolicy is the pull policy of Image. If it is empty, the API server sets the default.
	PullPolicy corev1.PullPolicy
	// Now returns the current time.
	Now func() time.Time

	// collecting is locked while samples of request routers are in memory.
	collecting sync.Mutex
	statuses   statuscache.Memory[semmoev1.AffinityProfileStatus]
}

// SetupWithManager registers the controller.
func (r *Reconciler) SetupWithManager(m ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(m).
		Named("affinityprofile").
		// No predicate: if another client changes the status, it is written again.
		For(&semmoev1.AffinityProfile{}).
		Owns(&batchv1.Job{}).
		// Pods are owned by Jobs. Their label identifies the profile.
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

// profilesOf maps a MoEDeployment to the profiles that use it or belong to it.
func (r *Reconciler) profilesOf(ctx context.Context, moed client.Object) []reconcile.Request {
	var profiles semmoev1.AffinityProfileList
	if err := r.List(ctx, &profiles, client.InNamespace(moed.GetNamespace()), client.UnsafeDisableDeepCopy); err != nil {
		return nil // the cache is not synchronized yet, and will report the profiles
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

// Reconcile observes the objects, acts, and reports the status.
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
	inspections, after, inspectErr := o.Inspection.Writes(r.nextInspection(profile, o), now)
	do := decide(o, now)
	phases := errors.Join(inspectErr, r.write(ctx, profile, inspections...), r.act(ctx, profile, o, do))
	o.Failure = result.PermanentErrorText(phases)
	after = result.ShortestDelay(after, do.After)

	failedMounts, err := lookup.FailedMounts(ctx, r.Events, pods, now)
	phases = errors.Join(phases, err)
	problem, again := podhealth.Find(pods, failedMounts, now)
	if problem == nil {
		var eventsAgain time.Duration
		problem, eventsAgain, err = r.refusedPods(ctx, o, now)
		phases = errors.Join(phases, err)
		again = result.ShortestDelay(again, eventsAgain)
	}
	o.Problem = problem
	after = result.ShortestDelay(after, again)
	phases = errors.Join(phases, r.applyStatus(ctx, profile, statusOf(profile, o, now)))
	return ctrl.Result{RequeueAfter: after}, phases
}

// observe reads the input of all decisions, and the pods whose problems are reported.
func (r *Reconciler) observe(ctx context.Context, profile *semmoev1.AffinityProfile, now time.Time) (observation, []*corev1.Pod, error) {
	o := observation{Invalid: validate(profile)}
	jobs, pods, err := r.list(ctx, profile.Namespace, client.MatchingLabels{semmoev1.LabelProfile: profile.Name, semmoev1.LabelComponent: semmoev1.ComponentInspect})
	if err != nil {
		return o, nil, err
	}
	jobs = slices.DeleteFunc(jobs, func(job *batchv1.Job) bool { return !metav1.IsControlledBy(job, profile) })
	o.Inspection = inspection.Observe(inputsOf(profile).Hash(), jobs, pods)
	if ownText(profile) && o.Inspection.Report != nil {
		o.Inspection.Dataset = ptr.To(recording.OwnTextReport(int(profile.Spec.Requests)))
	}
	report, dataset := o.Inspection.Report, o.Inspection.Dataset
	if report == nil || dataset == nil || o.Invalid != nil {
		return o, pods, nil
	}
	if report.Unprofilable != "" {
		o.Invalid = invalidf("ModelNotProfilable", "spec.model: %s", report.Unprofilable)
		return o, pods, nil
	}
	if profile.Spec.Target == semmoev1.ProfilingTargetDedicated && !usesTransformers(profile) {
		if err := report.CheckExpertParallelSize(int(profile.Spec.Parallelism.ExpertParallelSize)); err != nil {
			o.Invalid = invalidf("InvalidExpertParallelSize", "spec.parallelism.expertParallelSize: %v", err)
			return o, pods, nil
		}
	}
	o.ID = recording.ID(report.ModelDigest, dataset.Digest, samplingOf(profile))
	// The Jobs are read before the store. If a Job is observed as complete, its result is in the store.
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

// observeDeployment sets the reason for which the deployment cannot compute the profile now, and the reason for which a
// running Job must not continue. It sets neither if the deployment can, or the profile has no deployment.
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
		return fmt.Errorf("failed to get MoEDeployment %s: %w", name, err)
	}
	if profile.Spec.Target == semmoev1.ProfilingTargetServing {
		if o.Spoiled, o.Unseen, err = r.spoiled(ctx, moed, modelDigest); err != nil {
			return err
		}
	}
	o.Deployment = cmp.Or(o.Spoiled, waitsFor(profile.Spec.Target, name, moed, modelDigest))
	return nil
}

// spoiled returns the reason for which the responses of a deployment would not give a profile of the model, for a
// running Job and for a new one; the empty string if they would. Several revisions of one model do not matter here,
// because they choose the same experts. unseen is true if no event reports the end of this state: the status of the
// deployment reports a change of the model, but no event reports a new Service or the deletion of the last engine pod.
func (r *Reconciler) spoiled(ctx context.Context, moed *semmoev1.MoEDeployment, modelDigest string) (why string, unseen bool, err error) {
	if model := moed.Status.Model; model != nil && model.Digest != modelDigest {
		return otherModel(moed.Name, modelDigest), false, nil
	}
	service := &corev1.Service{}
	if err := r.Get(ctx, client.ObjectKeyFromObject(moed), service); client.IgnoreNotFound(err) != nil {
		return "", false, fmt.Errorf("failed to get Service %s: %w", moed.Name, err)
	}
	if !metav1.IsControlledBy(service, moed) { // the cache contains only the operator's Services: a Service of another owner may exist
		return fmt.Sprintf("MoEDeployment %s does not control a Service %s that could receive the requests", moed.Name, moed.Name), true, nil
	}
	if !leadsToEngines(moed, service) {
		return "", false, nil
	}
	var pods corev1.PodList
	err = r.List(ctx, &pods, client.InNamespace(moed.Namespace), client.UnsafeDisableDeepCopy,
		client.MatchingLabels{semmoev1.LabelDeployment: moed.Name, semmoev1.LabelComponent: semmoev1.ComponentEngine})
	if err != nil {
		return "", false, fmt.Errorf("failed to list the engine pods of MoEDeployment %s: %w", moed.Name, err)
	}
	if !slices.ContainsFunc(pods.Items, permuted) {
		return "", false, nil
	}
	return fmt.Sprintf("the Service of MoEDeployment %s selects engines with reshuffled weights, which return permuted expert IDs. Set spec.routing.mode to Router, or use target Dedicated", moed.Name), true, nil
}

// leadsToEngines reports whether requests to the Service of a deployment reach engines without the request router, now
// or once the latest spec is realized. Only the request router translates expert IDs of reshuffled weights.
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
		return nil, nil, fmt.Errorf("failed to list Jobs and their pods: %w", err)
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

// ownText reports whether the model writes the text of the profile, so that no data set is inspected.
func ownText(profile *semmoev1.AffinityProfile) bool {
	return profile.Spec.Dataset != nil && profile.Spec.Dataset.OwnText != nil
}

func inputsOf(profile *semmoev1.AffinityProfile) inspection.Inputs {
	inputs := inspection.InputsOf(profile.Spec.Model, profile.Spec.Template)
	if !ownText(profile) {
		inputs.Dataset = profile.Spec.Dataset
	}
	return inputs
}

// nextInspection returns a function that renders the Job of an inspection attempt. It returns nil if the spec is
// invalid.
func (r *Reconciler) nextInspection(profile *semmoev1.AffinityProfile, o observation) func(attempt int) *batchv1.Job {
	if o.Invalid != nil {
		return nil
	}
	inputs := inputsOf(profile)
	return func(attempt int) *batchv1.Job {
		return inspection.Job(profile.Namespace, inspectPrefix(profile), ownership.ControllerReference(profile, "AffinityProfile"),
			labelsOf(profile, semmoev1.ComponentInspect, semmoev1.LabelInputs, inputs.Hash()), inputs, r.Image, r.PullPolicy, attempt)
	}
}

// act executes an action.
func (r *Reconciler) act(ctx context.Context, profile *semmoev1.AffinityProfile, o observation, do action) error {
	for _, job := range o.Attempts.Obsolete {
		if err := r.write(ctx, profile, writes.Delete{Object: job}); err != nil {
			return err
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
	// A Job with this name exists if the cache is stale, or while its predecessor is being deleted. Its events trigger
	// the next reconciliation.
	return r.write(ctx, profile, writes.Create{Object: job})
}

// write executes writes in order, until one fails.
func (r *Reconciler) write(ctx context.Context, profile *semmoev1.AffinityProfile, ordered ...writes.Write) error {
	return apply.Writer{Client: r.Client, Manager: manager, Recorder: r.Recorder}.WriteAll(ctx, profile, ordered)
}

// end terminates a Job whose engine is dead or whose deployment has changed, and records the reason in an annotation,
// because the pods are deleted. Kubernetes restarts a sidecar indefinitely, and the profiling container cannot
// distinguish an engine that loads its model from a dead one.
func (r *Reconciler) end(ctx context.Context, job *batchv1.Job, annotation, why string) error {
	if job.Annotations[annotationFailure] != "" || job.Annotations[annotationStopped] != "" {
		return nil // the Job is already ending
	}
	base := job.DeepCopy()
	metav1.SetMetaDataAnnotation(&job.ObjectMeta, annotation, why)
	job.Spec.ActiveDeadlineSeconds = ptr.To[int64](1)
	if err := r.Patch(ctx, job, client.MergeFrom(base), client.FieldOwner(manager)); err != nil {
		return fmt.Errorf("failed to end profiling Job %s: %w", job.Name, err)
	}
	return nil
}

// refusedPods returns the reason for which the pods of a Job cannot be created: a quota, or the pod security standard
// of the namespace. In this case no pod exists that could report it. While a Job has no pod, it returns the delay until
// its events are read again.
func (r *Reconciler) refusedPods(ctx context.Context, o observation, now time.Time) (problem *podhealth.Problem, again time.Duration, err error) {
	for _, job := range []*batchv1.Job{o.Inspection.Running, o.Attempts.Running} {
		if job == nil || job.Status.Active > 0 || ptr.Deref(job.Spec.Suspend, false) {
			continue // it has pods, or waits in a queue without any
		}
		again = lookup.EventsPeriod
		message, err := lookup.LastEvent(ctx, r.Events, job, "FailedCreate", now)
		if err != nil {
			return nil, 0, err
		}
		if message != "" {
			return podhealth.PodsRejected(message), again, nil
		}
	}
	return nil, again, nil
}
