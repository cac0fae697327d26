// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/semmoe/operator/test/localcluster/internal/sandbox"
)

// Limits of the termination message, equal to the kubelet's.
const (
	maxMessageBytes  = 4096
	maxLogTailBytes  = 2048
	maxLogTailLines  = 80
	startErrorCode   = 128
	startErrorReason = "StartError"
)

// container is one run of a container.
type container struct {
	spec    *corev1.Container
	process *sandbox.Process
	log     string // path
	message string // path of the termination message
	exited  chan struct{}
	// endProbes ends all probes. endLiveness ends the probes that can kill the container.
	endProbes, endLiveness context.CancelFunc
	stopping               bool
}

// startContainer starts a container, or records the reason why the container cannot start.
func (w *worker) startContainer(ctx context.Context, c *corev1.Container) {
	r := w.records[c.Name]
	binary, ok := w.agent.image(c.Image)
	if !ok {
		w.refuseImage(c, r)
		return
	}
	if reason := unsupported(w.pod, c); reason != "" {
		w.refuse(c, r, fmt.Errorf("not supported by the local node: %s", reason))
		return
	}
	spec, err := w.sandboxSpec(ctx, c, binary)
	if err != nil {
		w.refuse(c, r, err)
		return
	}
	run := &container{spec: c, exited: make(chan struct{}), message: filepath.Join(w.dir, c.Name+".message")}
	r.image = "local:" + binary
	now := time.Now()
	restarts := r.restarts
	if r.ended != nil {
		restarts++
	}
	run.log = filepath.Join(w.agent.logs, fmt.Sprintf("%s_%s_%s_%d.log", w.pod.Namespace, w.pod.Name, c.Name, restarts))
	run.process, err = startProcess(run, spec)
	r.start(fmt.Sprintf("local://%s/%s/%d", w.pod.UID, c.Name, restarts), now)
	if err != nil {
		w.agent.event(w.pod, corev1.EventTypeWarning, "Failed", fmt.Sprintf("Error: container %s: %v", c.Name, err))
		r.end(startErrorCode, startErrorReason, err.Error(), time.Now())
		return
	}
	w.agent.event(w.pod, corev1.EventTypeNormal, "Started", "Started container "+c.Name)
	w.running[c.Name] = run
	w.startProbes(run, r)
	go func() {
		code := run.process.Wait()
		run.endProbes()
		message := run.terminationMessage(code)
		close(run.exited)
		w.post(func() { w.containerEnded(run, code, message) })
	}()
}

func (w *worker) refuseImage(c *corev1.Container, r *record) {
	// The first failure has the reason ErrImagePull; later failures have ImagePullBackOff.
	reason := "ErrImagePull"
	if r.waiting != nil && (r.waiting.Reason == reason || r.waiting.Reason == "ImagePullBackOff") {
		reason = "ImagePullBackOff"
	}
	message := fmt.Sprintf("Failed to pull image %q: the local cluster has only %s", c.Image, w.agent.imageNames())
	w.agent.event(w.pod, corev1.EventTypeWarning, "Failed", message)
	r.refuse(reason, message, time.Now())
}

// refuse records that the container is not started because of its configuration.
func (w *worker) refuse(c *corev1.Container, r *record, err error) {
	w.agent.event(w.pod, corev1.EventTypeWarning, "Failed", fmt.Sprintf("Error: container %s: %v", c.Name, err))
	r.refuse("CreateContainerConfigError", err.Error(), time.Now())
}

// containerEnded handles the end of a container.
func (w *worker) containerEnded(run *container, code int32, message string) {
	delete(w.running, run.spec.Name)
	reason := "Completed"
	if code != 0 {
		reason = "Error"
	}
	w.records[run.spec.Name].end(code, reason, message, time.Now())
}

// sandboxSpec returns the sandbox specification of the container.
func (w *worker) sandboxSpec(ctx context.Context, c *corev1.Container, binary string) (sandbox.Spec, error) {
	env, values, err := environment(ctx, w.agent.client, w.context(), c)
	if err != nil {
		return sandbox.Spec{}, err
	}
	visible, err := mounts(c, w.volumes, values)
	if err != nil {
		return sandbox.Spec{}, err
	}
	hosts, err := w.agent.hosts.directory(w.pod.Namespace)
	if err != nil {
		return sandbox.Spec{}, err
	}
	messagePath := c.TerminationMessagePath
	if messagePath == "" {
		messagePath = corev1.TerminationMessagePathDefault
	}
	message := filepath.Join(w.dir, c.Name+".message")
	if err := errors.Join(os.MkdirAll(w.dir, 0o755), os.WriteFile(message, nil, 0o666)); err != nil {
		return sandbox.Spec{}, err
	}
	visible = append(visible,
		sandbox.Mount{Source: message, Target: messagePath},
		sandbox.Mount{Source: hosts, Target: hostsMount, ReadOnly: true})
	command := expandAll(c.Command, values)
	if len(command) == 0 {
		command = []string{"/" + filepath.Base(binary)}
	}
	return sandbox.Spec{
		Binary:       binary,
		Args:         append(command, expandAll(c.Args, values)...),
		Env:          env,
		WorkingDir:   c.WorkingDir,
		Hostname:     hostname(w.pod),
		Mounts:       visible,
		Links:        []sandbox.Link{{Path: "/etc/hosts", Target: hostsMount + "/" + hostsFile}},
		ReadOnlyRoot: c.SecurityContext != nil && isTrue(c.SecurityContext.ReadOnlyRootFilesystem),
		MountPoint:   w.agent.mountPoint,
	}, nil
}

func startProcess(run *container, spec sandbox.Spec) (*sandbox.Process, error) {
	output, err := os.Create(run.log)
	if err != nil {
		return nil, err
	}
	defer output.Close()
	return sandbox.Start(spec, output)
}

// beginStop stops the container: it runs the preStop hook, sends SIGTERM, and sends SIGKILL when the context hard ends.
// Only the first call has an effect.
func (run *container) beginStop(hard context.Context, podIP string) {
	if run.stopping {
		return
	}
	run.stopping = true
	run.endLiveness()
	go func() {
		run.preStop(hard, podIP)
		run.signal(syscall.SIGTERM)
		select {
		case <-run.exited:
		case <-hard.Done():
			run.signal(syscall.SIGKILL)
		}
	}()
}

func (run *container) signal(s syscall.Signal) {
	select {
	case <-run.exited:
		return
	default:
	}
	if err := run.process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		klog.ErrorS(err, "Failed to signal the container", "container", run.spec.Name, "signal", s)
	}
}

// preStop runs the preStop hook. The hook is canceled when the grace period or the container ends.
func (run *container) preStop(hard context.Context, podIP string) {
	if run.spec.Lifecycle == nil || run.spec.Lifecycle.PreStop == nil {
		return
	}
	ctx, cancel := context.WithCancel(hard)
	defer cancel()
	go func() {
		select {
		case <-run.exited:
			cancel()
		case <-ctx.Done():
		}
	}()
	switch hook := run.spec.Lifecycle.PreStop; {
	case hook.Sleep != nil:
		select {
		case <-time.After(time.Duration(hook.Sleep.Seconds) * time.Second):
		case <-ctx.Done():
		}
	case hook.HTTPGet != nil:
		// The result of the hook is only logged: the container is stopped in any case.
		if err := httpGet(ctx, run.spec, hook.HTTPGet, podIP, http.StatusBadRequest); err != nil {
			klog.InfoS("The preStop hook failed", "container", run.spec.Name, "err", err)
		}
	}
}

// terminationMessage reads the termination message of the container. If the message is empty, the exit code is not 0
// and the policy is FallbackToLogsOnError, it returns the end of the log.
func (run *container) terminationMessage(code int32) string {
	data, err := readTail(run.message, maxMessageBytes)
	if err != nil {
		klog.ErrorS(err, "Failed to read the termination message", "container", run.spec.Name)
	}
	if len(data) > 0 || code == 0 || run.spec.TerminationMessagePolicy != corev1.TerminationMessageFallbackToLogsOnError {
		return string(data)
	}
	data, err = readTail(run.log, maxLogTailBytes)
	if err != nil {
		klog.ErrorS(err, "Failed to read the log", "container", run.spec.Name)
	}
	lines := strings.SplitAfter(string(data), "\n")
	return strings.Join(lines[max(0, len(lines)-maxLogTailLines):], "")
}

// readTail reads the last limit bytes of a file, or the whole file if it is smaller.
func readTail(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	offset := max(0, info.Size()-limit)
	data := make([]byte, info.Size()-offset)
	n, err := f.ReadAt(data, offset)
	if n == len(data) {
		err = nil
	}
	return data[:n], err
}
