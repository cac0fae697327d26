// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"
	"k8s.io/klog/v2"
)

const (
	// retryInterval is the delay after an error of the API or of a volume.
	retryInterval = time.Second
	// sidecarGrace is the minimum time for a sidecar to end, even if the main containers have used the whole grace
	// period of the pod. It does not apply if the pod was deleted with grace period 0.
	sidecarGrace = 2 * time.Second
)

// worker runs one pod. Only the goroutine of run accesses the mutable fields. Other goroutines post events.
type worker struct {
	agent     *Agent
	namespace string
	events    chan func()
	done      chan struct{}

	pod *corev1.Pod
	// removed is true after the API object was deleted.
	removed bool
	dir     string
	ip      string
	began   time.Time
	volumes map[string]*volume
	dirty   map[string]bool // volumes whose sources have changed
	records map[string]*record
	running map[string]*container
	stop    *stopping
	// terminal is true after the final status was written and the pod's resources were released.
	terminal bool
}

// stopping is the state of a pod that is being stopped.
type stopping struct {
	hard     context.Context // when it ends, containers get SIGKILL
	kill     context.CancelFunc
	timer    *time.Timer
	deadline time.Time
	// afterwards is the context that last returns; nil until last is called.
	afterwards context.Context
	// reason and message are written to the status. They are empty unless the node has ended the pod.
	reason, message string
}

func newWorker(a *Agent, pod *corev1.Pod) *worker {
	w := &worker{
		agent: a, namespace: pod.Namespace, events: make(chan func(), 128), done: make(chan struct{}),
		pod: pod, dir: filepath.Join(a.dir, "pods", string(pod.UID)), began: time.Now(),
		volumes: map[string]*volume{}, dirty: map[string]bool{},
		records: map[string]*record{}, running: map[string]*container{},
	}
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		w.records[c.Name] = &record{}
	}
	return w
}

// post sends an event to the worker. It does nothing after the worker has ended.
func (w *worker) post(event func()) {
	select {
	case w.events <- event:
	case <-w.done:
	}
}

// run handles events until the pod is removed.
func (w *worker) run(ctx context.Context) {
	defer close(w.done)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case event := <-w.events:
			event()
		case <-timer.C:
		}
		next, err := w.sync(ctx)
		if err != nil {
			klog.ErrorS(err, "Pod sync failed", "pod", klog.KObj(w.pod))
			next = retryInterval
		}
		if w.removed && len(w.running) == 0 {
			w.release()
			if err := RemoveTree(w.dir); err != nil {
				klog.ErrorS(err, "Failed to remove the pod directory", "pod", klog.KObj(w.pod))
			}
			return
		}
		timer.Stop()
		if next > 0 {
			timer.Reset(next)
		}
	}
}

// update handles a changed pod object.
func (w *worker) update(pod *corev1.Pod) {
	if !reflect.DeepEqual(pod.Labels, w.pod.Labels) || !reflect.DeepEqual(pod.Annotations, w.pod.Annotations) {
		for i := range pod.Spec.Volumes {
			if v := &pod.Spec.Volumes[i]; usesFields(v) {
				w.dirty[v.Name] = true
			}
		}
	}
	w.pod = pod
}

// sourceChanged handles a changed ConfigMap or Secret of the pod's namespace.
func (w *worker) sourceChanged(kind, name string) {
	for i := range w.pod.Spec.Volumes {
		if v := &w.pod.Spec.Volumes[i]; references(v, kind, name) {
			w.dirty[v.Name] = true
		}
	}
}

// sync advances the pod by one step. It returns the delay until the next sync if no event occurs; 0 means none is
// needed.
func (w *worker) sync(ctx context.Context) (time.Duration, error) {
	now := time.Now()
	if w.terminal {
		return 0, w.deleteObject(ctx)
	}
	w.checkEnd(now)
	var next time.Duration
	if w.stop == nil {
		var err error
		if next, err = w.advance(ctx, now); err != nil {
			return 0, errors.Join(err, w.writeStatus(ctx, false))
		}
	}
	if w.stop != nil {
		w.stopContainers()
		if len(w.running) == 0 {
			return 0, w.finish(ctx)
		}
	}
	return next, w.writeStatus(ctx, false)
}

// checkEnd starts to stop the pod if its deadline has passed or its object is deleted, or shortens the remaining time.
func (w *worker) checkEnd(now time.Time) {
	switch limit := w.pod.Spec.ActiveDeadlineSeconds; {
	case w.removed:
		w.beginStop(0, "", "")
	case w.pod.DeletionTimestamp != nil:
		w.beginStop(gracePeriod(w.pod), "", "")
	case limit != nil && now.Sub(w.began) >= time.Duration(*limit)*time.Second:
		w.beginStop(gracePeriod(w.pod), "DeadlineExceeded", "Pod was active on the node longer than the specified deadline")
	}
}

// gracePeriod returns the grace period of the deletion, which may be shorter than the pod's, or the pod's grace period.
func gracePeriod(pod *corev1.Pod) time.Duration {
	seconds := int64(30)
	if s := pod.Spec.TerminationGracePeriodSeconds; s != nil {
		seconds = *s
	}
	if s := pod.DeletionGracePeriodSeconds; s != nil {
		seconds = *s
	}
	return time.Duration(seconds) * time.Second
}

// beginStop starts to stop the pod, or shortens the remaining grace period.
func (w *worker) beginStop(grace time.Duration, reason, message string) {
	deadline := time.Now().Add(grace)
	if w.stop == nil {
		hard, kill := context.WithCancel(context.Background())
		w.stop = &stopping{hard: hard, kill: kill, timer: time.AfterFunc(grace, kill), deadline: deadline, reason: reason, message: message}
		if w.pod.DeletionTimestamp != nil {
			w.agent.event(w.pod, corev1.EventTypeNormal, "Killing", "Stopping the pod's containers")
		}
		return
	}
	if deadline.Before(w.stop.deadline) {
		w.stop.deadline = deadline
		w.stop.timer.Reset(grace)
	}
}

// advance starts the containers that decide selects.
func (w *worker) advance(ctx context.Context, now time.Time) (time.Duration, error) {
	if err := w.prepare(ctx); err != nil {
		return 0, err
	}
	untilRefresh := w.refreshVolumes(ctx, now)
	d := decide(w.pod, w.records, now)
	if d.finished {
		w.beginStop(gracePeriod(w.pod), "", "")
		return 0, nil
	}
	for _, name := range d.start {
		w.startContainer(ctx, findContainer(w.pod, name))
	}
	if len(d.start) > 0 {
		// A started or refused container may allow the next step immediately.
		d.retryIn = min(max(d.retryIn, time.Millisecond), 10*time.Millisecond)
	}
	return earliest(d.retryIn, w.untilDeadline(now), untilRefresh), nil
}

// earliest returns the smallest nonzero duration.
func earliest(durations ...time.Duration) time.Duration {
	var result time.Duration
	for _, d := range durations {
		if d > 0 && (result == 0 || d < result) {
			result = d
		}
	}
	return result
}

func (w *worker) untilDeadline(now time.Time) time.Duration {
	if w.pod.Spec.ActiveDeadlineSeconds == nil {
		return 0
	}
	end := w.began.Add(time.Duration(*w.pod.Spec.ActiveDeadlineSeconds) * time.Second)
	return max(end.Sub(now), time.Millisecond)
}

// prepare allocates the pod's address and prepares its volumes. It can be called again after an error.
func (w *worker) prepare(ctx context.Context) error {
	if w.ip == "" {
		ip, err := w.agent.addresses.take()
		if err != nil {
			return err
		}
		w.ip = ip
	}
	if reason := unsupportedPod(&w.pod.Spec); reason != "" {
		return nil // Each container reports the error.
	}
	dir := filepath.Join(w.dir, "volumes")
	for i := range w.pod.Spec.Volumes {
		v := &w.pod.Spec.Volumes[i]
		if w.volumes[v.Name] != nil {
			continue
		}
		ready, err := setUpVolume(ctx, w.agent.client, w.context(), v, dir)
		if err != nil {
			err = fmt.Errorf("MountVolume.SetUp failed for volume %q: %w", v.Name, err)
			w.agent.event(w.pod, corev1.EventTypeWarning, "FailedMount", err.Error())
			return err
		}
		w.volumes[v.Name] = ready
	}
	return nil
}

// refreshVolumes refreshes the volumes that have changed or are about to expire, and returns the delay until the next
// refresh. A failure does not affect the containers, which keep their current content.
func (w *worker) refreshVolumes(ctx context.Context, now time.Time) time.Duration {
	var next time.Duration
	for i := range w.pod.Spec.Volumes {
		source := &w.pod.Spec.Volumes[i]
		v := w.volumes[source.Name]
		if v == nil {
			continue
		}
		if at := v.refreshAt(); w.dirty[source.Name] || !at.IsZero() && !now.Before(at) {
			if err := v.refresh(ctx, w.agent.client, w.context(), source); err != nil {
				klog.ErrorS(err, "Failed to refresh the volume", "pod", klog.KObj(w.pod), "volume", source.Name)
				next = earliest(next, retryInterval)
				continue
			}
			delete(w.dirty, source.Name)
		}
		if at := v.refreshAt(); !at.IsZero() {
			next = earliest(next, max(at.Sub(now), retryInterval))
		}
	}
	return next
}

func (w *worker) context() podContext {
	return podContext{pod: w.pod, podIP: w.ip, hostIP: w.agent.address, allocatable: w.agent.allocatable}
}

// stopContainers stops the running containers: all main and init containers concurrently, then the sidecars one after
// the other, from last to first.
func (w *worker) stopContainers() {
	var sidecars []string
	for _, c := range w.pod.Spec.InitContainers {
		if isSidecar(&c) && w.running[c.Name] != nil {
			sidecars = append(sidecars, c.Name)
		}
	}
	mainRuns := false
	for name, c := range w.running {
		if !slices.Contains(sidecars, name) {
			mainRuns = true
			c.beginStop(w.stop.hard, w.ip)
		}
	}
	if mainRuns || len(sidecars) == 0 {
		return
	}
	last, hard := w.running[sidecars[len(sidecars)-1]], w.stop.hard
	if time.Until(w.stop.deadline) < sidecarGrace && !w.removed && !w.deletedAtOnce() {
		hard = w.stop.last()
	}
	last.beginStop(hard, w.ip)
}

// last returns the context that bounds the sidecars after the grace period. All sidecars share this context.
func (s *stopping) last() context.Context {
	if s.afterwards == nil {
		var end context.CancelFunc
		s.afterwards, end = context.WithCancel(context.Background())
		time.AfterFunc(sidecarGrace, end)
	}
	return s.afterwards
}

func (w *worker) deletedAtOnce() bool {
	s := w.pod.DeletionGracePeriodSeconds
	return s != nil && *s == 0
}

// finish writes the final status of a pod without running containers, and releases its resources.
func (w *worker) finish(ctx context.Context) error {
	if err := w.writeStatus(ctx, true); err != nil {
		return err
	}
	w.release()
	w.terminal = true
	return w.deleteObject(ctx)
}

// release releases the pod's address and mounts.
func (w *worker) release() {
	if w.stop != nil {
		w.stop.timer.Stop()
		w.stop.kill()
	}
	for name, v := range w.volumes {
		if err := v.tearDown(); err != nil {
			klog.ErrorS(err, "Failed to unmount the volume", "pod", klog.KObj(w.pod), "volume", name)
		}
	}
	clear(w.volumes)
	if w.ip != "" {
		w.agent.addresses.put(w.ip)
		w.ip = ""
	}
}

// deleteObject removes the API object of a pod that has ended and is marked for deletion.
func (w *worker) deleteObject(ctx context.Context) error {
	if w.removed || w.pod.DeletionTimestamp == nil {
		return nil
	}
	now := int64(0)
	err := w.agent.client.CoreV1().Pods(w.pod.Namespace).Delete(ctx, w.pod.Name, metav1.DeleteOptions{
		GracePeriodSeconds: &now, Preconditions: metav1.NewUIDPreconditions(string(w.pod.UID)),
	})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil
	}
	return err
}

// writeStatus writes the pod's status if it differs from the status in the API server.
func (w *worker) writeStatus(ctx context.Context, stopped bool) error {
	if w.removed {
		return nil
	}
	o := observation{hostIP: w.agent.address, podIP: w.ip, startTime: wireTime(w.began), stopped: stopped}
	if w.stop != nil {
		o.reason, o.message = w.stop.reason, w.stop.message
	}
	pods := w.agent.client.CoreV1().Pods(w.pod.Namespace)
	current := w.pod
	return retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		if current == nil {
			var err error
			if current, err = pods.Get(ctx, w.pod.Name, metav1.GetOptions{}); err != nil {
				return ignoreNotFound(err)
			}
		}
		if current.UID != w.pod.UID {
			return nil
		}
		status := podStatus(current, w.records, o, time.Now())
		if apiequality.Semantic.DeepEqual(status, current.Status) {
			return nil
		}
		next := current.DeepCopy()
		next.Status = status
		written, err := pods.UpdateStatus(ctx, next, metav1.UpdateOptions{})
		if err != nil {
			current = nil
			return ignoreNotFound(err)
		}
		w.pod = written
		return nil
	})
}

func ignoreNotFound(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// RemoveTree removes a directory tree like os.RemoveAll, including directories that a container has made read-only.
func RemoveTree(path string) error {
	err := os.RemoveAll(path)
	if !errors.Is(err, fs.ErrPermission) {
		return err
	}
	_ = filepath.WalkDir(path, func(p string, e fs.DirEntry, err error) error {
		if err == nil && e.IsDir() {
			return os.Chmod(p, 0o700)
		}
		return nil
	})
	return os.RemoveAll(path)
}
