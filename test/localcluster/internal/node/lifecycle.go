// SPDX-License-Identifier: Apache-2.0

package node

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A container that fails repeatedly is restarted after 1, 2, 4 ... 30 s. The first restart is immediate, and a run of
// more than one minute resets the back-off. These values are a tenth of the kubelet's.
const (
	backoffBase  = time.Second
	backoffLimit = 30 * time.Second
	backoffReset = time.Minute
)

// record is the state of one container of a pod. Before the first start, only waiting can be set.
type record struct {
	image string
	id    string
	// waiting is the reason why the last start attempt failed; nil while the container runs.
	waiting *corev1.ContainerStateWaiting
	running *corev1.ContainerStateRunning
	// ended is the latest termination, previous is the one before it.
	ended, previous *corev1.ContainerStateTerminated
	restarts        int32
	// started and ready are the probe results. Without probes they are true while the container runs.
	started, ready bool
	// retryAt is the earliest time of the next start. backoff is the delay that determined it.
	retryAt time.Time
	backoff time.Duration
}

// everRan reports whether the container has been started at least once.
func (r *record) everRan() bool { return r.running != nil || r.ended != nil }

func (r *record) succeeded() bool { return r.running == nil && r.ended != nil && r.ended.ExitCode == 0 }

func (r *record) failed() bool { return r.running == nil && r.ended != nil && r.ended.ExitCode != 0 }

// start records the start of a run.
func (r *record) start(id string, now time.Time) {
	if r.ended == nil {
		r.backoff = 0
	} else {
		r.restarts++
		r.previous = r.ended
		r.ended = nil
		r.delay(now)
	}
	r.id = id
	r.waiting = nil
	r.running = &corev1.ContainerStateRunning{StartedAt: wireTime(now)}
	r.started, r.ready = false, false
}

// end records the end of the current run.
func (r *record) end(code int32, reason, message string, now time.Time) {
	startedAt := r.running.StartedAt
	if now.Sub(startedAt.Time) > backoffReset {
		r.backoff = 0
	}
	// start set backoff if this run was a restart, so the first restart is immediate.
	r.retryAt = now.Add(r.backoff)
	r.ended = &corev1.ContainerStateTerminated{
		ExitCode: code, Reason: reason, Message: message,
		StartedAt: startedAt, FinishedAt: wireTime(now), ContainerID: r.id,
	}
	r.running = nil
	r.started, r.ready = false, false
}

// wireTime truncates a time to the precision of the API (1 s), so that a status read from the API server compares
// equal.
func wireTime(t time.Time) metav1.Time { return metav1.NewTime(t.Truncate(time.Second)) }

// refuse records that the container could not start, and delays the next attempt.
func (r *record) refuse(reason, message string, now time.Time) {
	r.delay(now)
	r.waiting = &corev1.ContainerStateWaiting{Reason: reason, Message: message}
}

func (r *record) delay(now time.Time) {
	r.backoff = min(max(2*r.backoff, backoffBase), backoffLimit)
	r.retryAt = now.Add(r.backoff)
}

// decision is the next action for a pod.
type decision struct {
	// start names the containers to start now, in order.
	start []string
	// retryIn is the delay until the next decision if no event occurs; 0 means none is needed.
	retryIn time.Duration
	// finished is true if the main containers have completed, or can no longer complete. Running sidecars must then be
	// stopped.
	finished bool
}

// decide returns the next action for a pod that is not stopping. records contains an entry for every container.
func decide(pod *corev1.Pod, records map[string]*record, now time.Time) decision {
	var d decision
	if initialized(pod, records) {
		d.runMain(pod, records, now)
		return d
	}
	for _, c := range pod.Spec.InitContainers {
		r := records[c.Name]
		switch {
		case isSidecar(&c):
			if r.running == nil {
				d.startOrWait(c.Name, r, now)
			}
			if !r.started {
				return d
			}
		case r.succeeded():
		case r.failed() && pod.Spec.RestartPolicy == corev1.RestartPolicyNever:
			return decision{finished: true}
		default:
			if r.running == nil {
				d.startOrWait(c.Name, r, now)
			}
			return d
		}
	}
	d.runMain(pod, records, now)
	return d
}

// runMain handles the main containers and the sidecars that run next to them.
func (d *decision) runMain(pod *corev1.Pod, records map[string]*record, now time.Time) {
	d.finished = true
	for _, c := range pod.Spec.Containers {
		if r := records[c.Name]; r.running != nil || !r.everRan() || restarts(pod, r) {
			d.finished = false
		}
	}
	if d.finished {
		d.start, d.retryIn = nil, 0
		return
	}
	for _, c := range pod.Spec.InitContainers {
		if r := records[c.Name]; isSidecar(&c) && r.running == nil {
			d.startOrWait(c.Name, r, now)
		}
	}
	for _, c := range pod.Spec.Containers {
		if r := records[c.Name]; r.running == nil && (!r.everRan() || restarts(pod, r)) {
			d.startOrWait(c.Name, r, now)
		}
	}
}

func (d *decision) startOrWait(name string, r *record, now time.Time) {
	if wait := r.retryAt.Sub(now); wait > 0 {
		if d.retryIn == 0 || wait < d.retryIn {
			d.retryIn = wait
		}
		return
	}
	d.start = append(d.start, name)
}

// initialized reports whether the init containers have completed. After a main container has run once, the pod stays
// initialized, even if a sidecar fails later.
func initialized(pod *corev1.Pod, records map[string]*record) bool {
	for _, c := range pod.Spec.Containers {
		if records[c.Name].everRan() {
			return true
		}
	}
	for _, c := range pod.Spec.InitContainers {
		r := records[c.Name]
		if isSidecar(&c) && !r.started || !isSidecar(&c) && !r.succeeded() {
			return false
		}
	}
	return true
}

// restarts reports whether the restart policy requires another run of a main container that has ended.
func restarts(pod *corev1.Pod, r *record) bool {
	switch pod.Spec.RestartPolicy {
	case corev1.RestartPolicyAlways:
		return true
	case corev1.RestartPolicyOnFailure:
		return r.failed()
	default:
		return false
	}
}

func isSidecar(c *corev1.Container) bool {
	return c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
}
