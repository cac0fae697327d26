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

	"github.com/semmoe/operator/internal/jobstate"
	"github.com/semmoe/operator/internal/printable"
)

const (
	// FieldManager is the name under which results are written.
	FieldManager = "semmoe-calibrate"
	// ResultKey is the key of a result in its ConfigMap.
	ResultKey = "calibration.json"
	// maxResult bounds a result in a ConfigMap, of which the API server takes 1 MiB.
	maxResult = 900 << 10
	// cleanTime is how long an interrupted run may take to delete what it has made.
	cleanTime = 30 * time.Second
)

// errDeadline is the end of a run whose cluster has not told its end.
var errDeadline = errors.New("the Job's deadline has passed, and the cluster has not told how it ended")

// Cluster runs calibrations on a cluster.
type Cluster struct {
	Clients kubernetes.Interface
	// Poll is how often the pod is asked for.
	Poll time.Duration
	// Keep leaves Job and ConfigMap in place.
	Keep bool
}

// Run makes the Job of a spec, follows it to its end, and returns its result when write has written that. It tells the script's events, and
// what keeps the pod from running, as events "waiting". The Job is deleted when its result is written, or when the context ends before it is
// known, so that no GPU is held for nobody; one that has failed is left to be looked at, and one whose result is not written to be read.
func (c *Cluster) Run(ctx context.Context, spec Spec, tell func(Event), write func(*Result) error) (*Result, error) {
	job, err := c.create(ctx, spec)
	if err != nil {
		return nil, err
	}
	result, err := c.follow(ctx, job, tell)
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	} else if err != nil {
		return nil, fmt.Errorf("%w; Job %s/%s is left to be looked at: delete it before the next attempt", err, job.Namespace, job.Name)
	} else if err = write(result); err != nil {
		return nil, fmt.Errorf("%w; the result is in the log of Job %s/%s, which is left: kubectl logs -n %s job/%s | semmoe calibrate --from-log - --out FILE",
			err, job.Namespace, job.Name, job.Namespace, job.Name)
	}
	if c.Keep {
		return result, err
	}
	return result, errors.Join(err, c.remove(ctx, job))
}

// create makes the Job, and the script's ConfigMap, which belongs to it: whoever deletes the Job deletes both.
func (c *Cluster) create(ctx context.Context, spec Spec) (*batchv1.Job, error) {
	job, err := c.Clients.BatchV1().Jobs(spec.Namespace).Create(ctx, spec.Job(), metav1.CreateOptions{FieldManager: FieldManager})
	if apierrors.IsAlreadyExists(err) {
		return nil, fmt.Errorf("there is a Job %s/%s already: delete it, or give another --name", spec.Namespace, spec.Name)
	}
	if err != nil {
		return nil, fmt.Errorf("make the Job: %w", err)
	}
	script := spec.ConfigMap()
	script.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(job, batchv1.SchemeGroupVersion.WithKind("Job"))}
	if _, err := c.Clients.CoreV1().ConfigMaps(spec.Namespace).Create(ctx, script, metav1.CreateOptions{FieldManager: FieldManager}); err != nil {
		return nil, errors.Join(fmt.Errorf("make the ConfigMap with the script: %w", err), c.remove(ctx, job))
	}
	return job, nil
}

// remove deletes the Job, also when the context has ended.
func (c *Cluster) remove(ctx context.Context, job *batchv1.Job) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTime)
	defer cancel()
	err := c.Clients.BatchV1().Jobs(job.Namespace).Delete(ctx, job.Name, metav1.DeleteOptions{
		PropagationPolicy: ptr.To(metav1.DeletePropagationBackground), Preconditions: &metav1.Preconditions{UID: &job.UID},
	})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete Job %s/%s: %w", job.Namespace, job.Name, err)
	}
	return nil
}

// follow waits for the Job's pod and reads its log. A connection that ends early is made anew, and what has been told is not told again.
// A log that cannot be read is told of, and asked for until the pod's node can have no more to say.
func (c *Cluster) follow(ctx context.Context, job *batchv1.Job, tell func(Event)) (*Result, error) {
	told, said := 0, ""
	for {
		pod, err := c.started(ctx, job, tell)
		if err != nil {
			return nil, err
		}
		// Both are asked before the log is read: the log of a pod that has ended is whole, and one that runs may end while it is read.
		ended, lost := pod.Status.Phase != corev1.PodRunning, overdue(job, pod)
		result, err := c.read(ctx, pod, &told, tell)
		if !errors.Is(err, ErrUnfinished) {
			return result, err
		}
		if ended && !broken(err) {
			return nil, fmt.Errorf("%w: %s", err, endOf(job, pod))
		}
		if lost != nil && !ended {
			return nil, errors.Join(lost, err)
		}
		if unread := (*unreadError)(nil); errors.As(err, &unread) && unread.Error() != said && ctx.Err() == nil {
			said = unread.Error()
			tell(Event{Event: "waiting", Message: said})
		}
		if err := c.pause(ctx); err != nil {
			return nil, err
		}
	}
}

// read reads the log of a pod from its beginning, and tells the events after the first told ones, which it counts. A log that cannot be
// read counts as unfinished: the container may not have begun, the connection may have broken.
func (c *Cluster) read(ctx context.Context, pod *corev1.Pod, told *int, tell func(Event)) (*Result, error) {
	log, err := c.Clients.CoreV1().Pods(pod.Namespace).GetLogs(pod.Name, &corev1.PodLogOptions{Container: Container, Follow: true}).Stream(ctx)
	if err != nil {
		return nil, &unreadError{pod.Name, err}
	}
	defer log.Close()
	seen := 0
	result, err := Read(log, func(event Event) {
		if seen++; seen > *told {
			*told = seen
			tell(event)
		}
	})
	return result, err
}

// unreadError is what keeps the log of a pod from being read.
type unreadError struct {
	pod   string
	cause error
}

func (e *unreadError) Error() string { return fmt.Sprintf("the log of pod %s: %v", e.pod, e.cause) }

func (e *unreadError) Unwrap() []error { return []error{ErrUnfinished, e.cause} }

// overdue tells why a pod is waited for no longer: of one whose node is lost the cluster says for ever that it runs. Nil while it may run.
func overdue(job *batchv1.Job, pod *corev1.Pod) error {
	if deleted := pod.DeletionTimestamp; deleted != nil && time.Since(deleted.Time) > cleanTime {
		return fmt.Errorf("pod %s was to be gone by %s, and its node %s has not told how it ended", pod.Name, deleted.UTC().Format(time.RFC3339), pod.Spec.NodeName)
	}
	if begun := pod.Status.StartTime; begun != nil && time.Since(begun.Time) > longest(job) {
		return errDeadline
	}
	return nil
}

// longest is the time after which a Job that has begun is over, and has been cleaned up.
func longest(job *batchv1.Job) time.Duration {
	return time.Duration(*job.Spec.ActiveDeadlineSeconds)*time.Second + cleanTime
}

// broken reports whether a log ended with the connection: the API server has refused nothing, and another attempt may read all of it.
func broken(err error) bool {
	var refusal apierrors.APIStatus
	return err != ErrUnfinished && !errors.As(err, &refusal) //nolint:errorlint // alone, it is the log that has ended
}

// started waits until the Job's pod runs or has ended. An API server that is away is asked again, for as long as the Job may go on
// without it; a Job that is suspended, or waits in a queue, is waited for.
func (c *Cluster) started(ctx context.Context, job *batchv1.Job, tell func(Event)) (*corev1.Pod, error) {
	said, answered := "", time.Now()
	for {
		pod, why, err := c.look(ctx, job)
		switch {
		case pod != nil || err != nil && final(err):
			return pod, err
		case err == nil:
			answered = time.Now()
		case time.Since(answered) > longest(job):
			return nil, errors.Join(errDeadline, err)
		default:
			why = err.Error()
		}
		if why != "" && why != said && ctx.Err() == nil {
			said = why
			tell(Event{Event: "waiting", Message: why})
		}
		if ended := c.pause(ctx); ended != nil {
			return nil, errors.Join(ended, err)
		}
	}
}

// look finds the Job's pod that runs or has ended, or tells why there is none yet.
func (c *Cluster) look(ctx context.Context, job *batchv1.Job) (pod *corev1.Pod, why string, err error) {
	current, err := c.Clients.BatchV1().Jobs(job.Namespace).Get(ctx, job.Name, metav1.GetOptions{})
	if err != nil {
		return nil, "", fmt.Errorf("the Job of the calibration: %w", err)
	}
	pods, err := c.Clients.CoreV1().Pods(job.Namespace).List(ctx, metav1.ListOptions{LabelSelector: batchv1.JobNameLabel + "=" + job.Name})
	if err != nil {
		return nil, "", fmt.Errorf("the pods of the calibration: %w", err)
	}
	for i := range pods.Items {
		pod := &pods.Items[i]
		if metav1.IsControlledBy(pod, job) && pod.Status.Phase != corev1.PodPending && pod.Status.Phase != "" {
			return pod, "", nil
		}
	}
	if failed := jobstate.Finished(current, batchv1.JobFailed); failed != nil {
		return nil, "", &jobError{fmt.Sprintf("the Job has failed (%s: %s)%s", failed.Reason, failed.Message, because(pods.Items))}
	}
	return nil, obstacle(pods.Items), nil
}

// jobError is the end of a Job that has failed.
type jobError struct{ message string }

func (e *jobError) Error() string { return e.message }

// final reports whether another look would end with the same error.
func final(err error) bool {
	var failed *jobError
	return errors.As(err, &failed) || apierrors.IsNotFound(err) || apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err)
}

func because(pods []corev1.Pod) string {
	if why := obstacle(pods); why != "" {
		return ": " + why
	}
	return ""
}

// obstacle says what keeps a pod from running; empty where nothing is known.
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

// endOf tells how the container of a pod ended.
func endOf(job *batchv1.Job, pod *corev1.Pod) string {
	end := jobstate.Terminated(job, []*corev1.Pod{pod})
	if end == nil {
		return fmt.Sprintf("pod %s is %s (%s)", pod.Name, pod.Status.Phase, cmp.Or(pod.Status.Message, pod.Status.Reason, "no reason is known"))
	}
	return fmt.Sprintf("its container ended with exit code %d (%s): see kubectl logs %s", end.ExitCode, cmp.Or(end.Reason, "no reason is known"), pod.Name)
}

func (c *Cluster) pause(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(c.Poll):
		return nil
	}
}

// CheckStore tells why Store would refuse a ConfigMap, before there is a result: the API server tries it, and keeps nothing.
func (c *Cluster) CheckStore(ctx context.Context, namespace, name string) error {
	return c.store(ctx, namespace, name, "{}", metav1.DryRunAll)
}

// Store puts a result into a ConfigMap, in the place of an older one.
func (c *Cluster) Store(ctx context.Context, namespace, name string, result *Result) error {
	if len(result.JSON) > maxResult {
		return fmt.Errorf("the result has %d bytes, and a ConfigMap takes %d: write it to a file", len(result.JSON), maxResult)
	}
	return retry.RetryOnConflict(retry.DefaultRetry, func() error { return c.store(ctx, namespace, name, string(result.JSON)) })
}

func (c *Cluster) store(ctx context.Context, namespace, name, text string, dryRun ...string) error {
	configMaps := c.Clients.CoreV1().ConfigMaps(namespace)
	fresh := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{nameLabel: "semmoe-calibration"}},
		Data:       map[string]string{ResultKey: text},
	}
	_, err := configMaps.Create(ctx, fresh, metav1.CreateOptions{FieldManager: FieldManager, DryRun: dryRun})
	if !apierrors.IsAlreadyExists(err) {
		return err
	}
	stored, err := configMaps.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if stored.Labels[nameLabel] != fresh.Labels[nameLabel] || stored.Data[ResultKey] == "" {
		return fmt.Errorf("ConfigMap %s/%s holds no calibration (key %s, and label %s: %s), and is left alone: give another name",
			namespace, name, ResultKey, nameLabel, fresh.Labels[nameLabel])
	}
	stored.Data[ResultKey] = text
	_, err = configMaps.Update(ctx, stored, metav1.UpdateOptions{FieldManager: FieldManager, DryRun: dryRun})
	return err
}
