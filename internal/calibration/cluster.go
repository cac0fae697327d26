// SPDX-License-Identifier: Apache-2.0

package calibration

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/retry"
	"k8s.io/utils/ptr"

	"github.com/semmoe/operator/internal/kube/jobstate"
	"github.com/semmoe/operator/internal/kube/printable"
)

const (
	// fieldManager is the field manager of all writes.
	fieldManager = "semmoe-calibrate"
	// ResultKey is the key of a result in its ConfigMap.
	ResultKey = "calibration.json"
	// maxResult limits the size of a result in a ConfigMap, in bytes. The limit of the API server is 1 MiB.
	maxResult = 900 << 10
	// cleanupTimeout limits the time to delete the objects of an interrupted run.
	cleanupTimeout = 30 * time.Second
)

// errDeadline reports that the deadline of a run has passed without a known end of the Job.
var errDeadline = errors.New("the deadline of the Job has passed, and the cluster has not reported how the Job ended")

// Cluster runs calibrations on a cluster.
type Cluster struct {
	Clients kubernetes.Interface
	// Poll is the poll interval for the pod.
	Poll time.Duration
	// Keep leaves Job and ConfigMap in place.
	Keep bool
}

// Run creates the Job of a spec, follows it to its end, and returns its result after write has stored the result. It
// passes the events of the script to report, and the reason why the pod does not run as events "waiting".
//
// Run deletes the Job after the result is stored, or when the context ends before there is a result, so that no GPU
// stays reserved. It keeps a failed Job for inspection, and a Job whose result cannot be stored, because the log still
// contains the result.
func (c *Cluster) Run(ctx context.Context, spec Spec, report func(Event), write func(*Result) error) (*Result, error) {
	job, err := c.create(ctx, spec)
	if err != nil {
		return nil, err
	}
	result, err := c.follow(ctx, job, report)
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	} else if err != nil {
		return nil, fmt.Errorf("%w; Job %s/%s is kept for inspection: delete it before the next attempt", err, job.Namespace, job.Name)
	} else if err = write(result); err != nil {
		return nil, fmt.Errorf("%w; the result is in the log of Job %s/%s, which is kept: kubectl logs -n %s job/%s | semmoe calibrate --from-log - --out FILE",
			err, job.Namespace, job.Name, job.Namespace, job.Name)
	}
	if c.Keep {
		return result, err
	}
	return result, errors.Join(err, c.remove(ctx, job))
}

// create creates the Job, and the ConfigMap of the script. The Job owns the ConfigMap, so deleting the Job deletes
// both.
func (c *Cluster) create(ctx context.Context, spec Spec) (*batchv1.Job, error) {
	job, err := c.job(spec)
	if err != nil {
		return nil, err
	}
	job, err = c.Clients.BatchV1().Jobs(spec.Namespace).Create(ctx, job, metav1.CreateOptions{FieldManager: fieldManager})
	if apierrors.IsAlreadyExists(err) {
		return nil, fmt.Errorf("Job %s/%s already exists: delete it, or set another --name", spec.Namespace, spec.Name)
	}
	if err != nil {
		return nil, fmt.Errorf("failed to create the Job: %w", err)
	}
	script := spec.ConfigMap()
	script.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(job, batchv1.SchemeGroupVersion.WithKind("Job"))}
	if _, err := c.Clients.CoreV1().ConfigMaps(spec.Namespace).Create(ctx, script, metav1.CreateOptions{FieldManager: fieldManager}); err != nil {
		return nil, errors.Join(fmt.Errorf("failed to create the ConfigMap of the script: %w", err), c.remove(ctx, job))
	}
	return job, nil
}

// openShift is the API of OpenShift that assigns a user ID to each namespace, and rejects pods that name another one.
const openShift = "security.openshift.io/v1"

// job returns the Job of a spec for this cluster: OpenShift sets the user ID.
func (c *Cluster) job(spec Spec) (*batchv1.Job, error) {
	job := spec.Job()
	if _, err := c.Clients.Discovery().ServerResourcesForGroupVersion(openShift); err == nil {
		job.Spec.Template.Spec.SecurityContext.RunAsUser = nil
	} else if !apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("failed to read the APIs of the cluster: %w", err)
	}
	return job, nil
}

// remove deletes the Job, also if the context has ended.
func (c *Cluster) remove(ctx context.Context, job *batchv1.Job) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	err := c.Clients.BatchV1().Jobs(job.Namespace).Delete(ctx, job.Name, metav1.DeleteOptions{
		PropagationPolicy: ptr.To(metav1.DeletePropagationBackground), Preconditions: &metav1.Preconditions{UID: &job.UID},
	})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("failed to delete Job %s/%s: %w", job.Namespace, job.Name, err)
	}
	return nil
}

// follow waits for the pod of the Job and reads its log. If the connection ends early, follow reconnects and skips the
// events that it already reported. A log that cannot be read is reported as an event "waiting", and read again until
// the Job must have ended.
func (c *Cluster) follow(ctx context.Context, job *batchv1.Job, report func(Event)) (*Result, error) {
	reported, lastMessage := 0, ""
	for {
		pod, err := c.started(ctx, job, report)
		if err != nil {
			return nil, err
		}
		// Both are determined before the log is read: the log of an ended pod is complete, and a running pod may end
		// while its log is read.
		ended, lost := pod.Status.Phase != corev1.PodRunning, overdue(job, pod)
		result, err := c.read(ctx, pod, &reported, report)
		if !errors.Is(err, errUnfinished) {
			return result, err
		}
		if ended && !broken(err) {
			return nil, fmt.Errorf("%w: %s", err, endOf(job, pod))
		}
		if lost != nil && !ended {
			return nil, errors.Join(lost, err)
		}
		if unread := (*unreadError)(nil); errors.As(err, &unread) && unread.Error() != lastMessage && ctx.Err() == nil {
			lastMessage = unread.Error()
			report(Event{Event: "waiting", Message: lastMessage})
		}
		if err := c.pause(ctx); err != nil {
			return nil, err
		}
	}
}

// read reads the log of a pod from the beginning. It skips the first *reported events, reports the others and counts
// them in *reported. A log that cannot be read counts as unfinished, because the container may not have started or the
// connection may have failed.
func (c *Cluster) read(ctx context.Context, pod *corev1.Pod, reported *int, report func(Event)) (*Result, error) {
	log, err := c.Clients.CoreV1().Pods(pod.Namespace).GetLogs(pod.Name, &corev1.PodLogOptions{Container: Container, Follow: true}).Stream(ctx)
	if err != nil {
		return nil, &unreadError{pod.Name, err}
	}
	defer log.Close()
	seen := 0
	result, err := Read(log, func(event Event) {
		if seen++; seen > *reported {
			*reported = seen
			report(event)
		}
	})
	return result, err
}

// unreadError reports that the log of a pod cannot be read.
type unreadError struct {
	pod   string
	cause error
}

func (e *unreadError) Error() string {
	return fmt.Sprintf("failed to read the log of pod %s: %v", e.pod, e.cause)
}

func (e *unreadError) Unwrap() []error { return []error{errUnfinished, e.cause} }

// overdue returns an error if the pod must have ended. The API server reports a pod on a lost node as running forever.
// It returns nil while the pod may still run.
func overdue(job *batchv1.Job, pod *corev1.Pod) error {
	if deleted := pod.DeletionTimestamp; deleted != nil && time.Since(deleted.Time) > cleanupTimeout {
		return fmt.Errorf("pod %s should have been deleted by %s, and its node %s has not reported how it ended", pod.Name, deleted.UTC().Format(time.RFC3339), pod.Spec.NodeName)
	}
	if begun := pod.Status.StartTime; begun != nil && time.Since(begun.Time) > maxDuration(job) {
		return errDeadline
	}
	return nil
}

// maxDuration returns the time after which a started Job has ended and is cleaned up.
func maxDuration(job *batchv1.Job) time.Duration {
	return time.Duration(*job.Spec.ActiveDeadlineSeconds)*time.Second + cleanupTimeout
}

// broken reports whether the log ended because of the connection. Then the API server has not denied the request, and
// another attempt may read the complete log.
func broken(err error) bool {
	var denial apierrors.APIStatus
	return err != errUnfinished && !errors.As(err, &denial) //nolint:errorlint // an unwrapped errUnfinished means that the log has ended
}

// started waits until the Job's pod runs or has ended. It retries an unreachable API server for as long as the Job may
// run. It waits for a suspended or queued Job without a limit.
func (c *Cluster) started(ctx context.Context, job *batchv1.Job, report func(Event)) (*corev1.Pod, error) {
	lastMessage, answered := "", time.Now()
	for {
		pod, why, err := c.findPod(ctx, job)
		switch {
		case pod != nil || err != nil && final(err):
			return pod, err
		case err == nil:
			answered = time.Now()
		case time.Since(answered) > maxDuration(job):
			return nil, errors.Join(errDeadline, err)
		default:
			why = err.Error()
		}
		if why != "" && why != lastMessage && ctx.Err() == nil {
			lastMessage = why
			report(Event{Event: "waiting", Message: why})
		}
		if ended := c.pause(ctx); ended != nil {
			return nil, errors.Join(ended, err)
		}
	}
}

// findPod returns the Job's pod that runs or has ended. If there is none, it returns the reason, if known.
func (c *Cluster) findPod(ctx context.Context, job *batchv1.Job) (pod *corev1.Pod, why string, err error) {
	current, err := c.Clients.BatchV1().Jobs(job.Namespace).Get(ctx, job.Name, metav1.GetOptions{})
	if err != nil {
		return nil, "", fmt.Errorf("failed to get the calibration Job: %w", err)
	}
	pods, err := c.Clients.CoreV1().Pods(job.Namespace).List(ctx, metav1.ListOptions{LabelSelector: batchv1.JobNameLabel + "=" + job.Name})
	if err != nil {
		return nil, "", fmt.Errorf("failed to list the calibration pods: %w", err)
	}
	for i := range pods.Items {
		pod := &pods.Items[i]
		if metav1.IsControlledBy(pod, job) && pod.Status.Phase != corev1.PodPending && pod.Status.Phase != "" {
			return pod, "", nil
		}
	}
	if failed := jobstate.Finished(current, batchv1.JobFailed); failed != nil {
		return nil, "", &jobError{fmt.Sprintf("the Job has failed (%s: %s)%s", failed.Reason, failed.Message, reasonSuffix(pods.Items))}
	}
	return nil, obstacle(pods.Items), nil
}

// jobError reports a failed Job.
type jobError struct{ message string }

func (e *jobError) Error() string { return e.message }

// final reports whether a retry would end with the same error.
func final(err error) bool {
	var failed *jobError
	return errors.As(err, &failed) || apierrors.IsNotFound(err) || apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err)
}

func reasonSuffix(pods []corev1.Pod) string {
	if why := obstacle(pods); why != "" {
		return ": " + why
	}
	return ""
}

// obstacle returns the reason why a pod does not run. It is empty if unknown.
func obstacle(pods []corev1.Pod) string {
	for i := range pods {
		pod := &pods[i]
		for _, condition := range pod.Status.Conditions {
			if condition.Type == corev1.PodScheduled && condition.Status == corev1.ConditionFalse {
				return cmp.Or(condition.Message, condition.Reason)
			}
		}
		for _, status := range pod.Status.ContainerStatuses {
			if waiting := status.State.Waiting; waiting != nil {
				return printable.Line(waiting.Reason+": "+cmp.Or(waiting.Message, "image "+status.Image), 512)
			}
		}
	}
	return ""
}

// endOf describes how the container of a pod ended.
func endOf(job *batchv1.Job, pod *corev1.Pod) string {
	end := jobstate.Terminated(job, []*corev1.Pod{pod})
	if end == nil {
		return fmt.Sprintf("pod %s is %s (%s)", pod.Name, pod.Status.Phase, cmp.Or(pod.Status.Message, pod.Status.Reason, "unknown reason"))
	}
	return fmt.Sprintf("the container exited with code %d (%s): see kubectl logs %s", end.ExitCode, cmp.Or(end.Reason, "unknown reason"), pod.Name)
}

func (c *Cluster) pause(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(c.Poll):
		return nil
	}
}

// CheckStore returns the error that Store would return for a ConfigMap, before there is a result. It uses a server-side
// dry run.
func (c *Cluster) CheckStore(ctx context.Context, namespace, name string) error {
	return c.store(ctx, namespace, name, "{}", metav1.DryRunAll)
}

// Store writes a result to a ConfigMap and replaces an older result.
func (c *Cluster) Store(ctx context.Context, namespace, name string, result *Result) error {
	if len(result.JSON) > maxResult {
		return fmt.Errorf("the result has %d bytes, and a ConfigMap at most %d: write it to a file", len(result.JSON), maxResult)
	}
	return retry.RetryOnConflict(retry.DefaultRetry, func() error { return c.store(ctx, namespace, name, string(result.JSON)) })
}

func (c *Cluster) store(ctx context.Context, namespace, name, text string, dryRun ...string) error {
	configMaps := c.Clients.CoreV1().ConfigMaps(namespace)
	fresh := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{nameLabel: "semmoe-calibration"}},
		Data:       map[string]string{ResultKey: text},
	}
	_, err := configMaps.Create(ctx, fresh, metav1.CreateOptions{FieldManager: fieldManager, DryRun: dryRun})
	if !apierrors.IsAlreadyExists(err) {
		return err
	}
	stored, err := configMaps.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if stored.Labels[nameLabel] != fresh.Labels[nameLabel] || stored.Data[ResultKey] == "" {
		return fmt.Errorf("ConfigMap %s/%s exists and is not a calibration (key %s, and label %s: %s): set another name",
			namespace, name, ResultKey, nameLabel, fresh.Labels[nameLabel])
	}
	stored.Data[ResultKey] = text
	_, err = configMaps.Update(ctx, stored, metav1.UpdateOptions{FieldManager: fieldManager, DryRun: dryRun})
	return err
}
