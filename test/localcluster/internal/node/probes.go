// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/semmoe/operator/test/load"
)

// probeClient accepts any certificate, like the kubelet. It opens a connection for each probe, so that a server that
// only answers on old connections does not count as healthy.
var probeClient = &http.Client{Transport: &http.Transport{
	TLSClientConfig:   &tls.Config{InsecureSkipVerify: true},
	DisableKeepAlives: true,
	Proxy:             nil,
}}

// startProbes starts the probes of a run. A container without a startup probe counts as started. A container without a
// readiness probe counts as ready.
func (w *worker) startProbes(run *container, r *record) {
	all, endAll := context.WithCancel(context.Background())
	live, endLive := context.WithCancel(all)
	run.endProbes, run.endLiveness = endAll, endLive
	started := func() {
		r.started = true
		r.ready = run.spec.ReadinessProbe == nil
		if p := run.spec.ReadinessProbe; p != nil {
			go w.probe(all, run, "Readiness", p, func(ok bool) { r.ready = ok })
		}
		if p := run.spec.LivenessProbe; p != nil {
			go w.probe(live, run, "Liveness", p, func(ok bool) { w.restartUnlessHealthy(run, p, ok) })
		}
	}
	p := run.spec.StartupProbe
	if p == nil {
		started()
		return
	}
	go w.probe(live, run, "Startup", p, func(ok bool) {
		if !ok {
			w.restartUnlessHealthy(run, p, false)
		} else if !r.started {
			started()
		}
	})
}

// restartUnlessHealthy stops a container that has failed its probe. The restart policy then determines whether it
// restarts.
func (w *worker) restartUnlessHealthy(run *container, p *corev1.Probe, ok bool) {
	if ok || run.stopping {
		return
	}
	grace := gracePeriod(w.pod)
	if p.TerminationGracePeriodSeconds != nil {
		grace = time.Duration(*p.TerminationGracePeriodSeconds) * time.Second
	}
	w.agent.event(w.pod, corev1.EventTypeNormal, "Killing",
		fmt.Sprintf("Container %s failed its probe, will be restarted according to the restart policy", run.spec.Name))
	hard, kill := context.WithCancel(context.Background())
	time.AfterFunc(grace, kill)
	run.beginStop(hard, w.ip)
}

// probe runs a probe until ctx ends or, for a startup probe, until the probe has succeeded. It reports each change of
// the verdict in the worker's goroutine. The verdict changes after as many equal results in a row as the threshold
// requires. Timeouts, and the pauses after failures, grow with the load of the machine: a container that is slow on a
// busy machine is neither removed from endpoints nor restarted.
func (w *worker) probe(ctx context.Context, run *container, kind string, p *corev1.Probe, report func(ok bool)) {
	podIP := w.ip
	period := time.Duration(max(p.PeriodSeconds, 1)) * time.Second
	timeout := time.Duration(max(p.TimeoutSeconds, 1)) * time.Second
	verdict := newVerdict(int(max(p.SuccessThreshold, 1)), int(max(p.FailureThreshold, 1)))
	if !sleep(ctx, time.Duration(p.InitialDelaySeconds)*time.Second) {
		return
	}
	for {
		err := probeOnce(ctx, run.spec, p, podIP, load.Scale(timeout))
		if ctx.Err() != nil {
			return
		}
		changed, ok := verdict.add(err == nil)
		w.post(func() {
			if ctx.Err() != nil {
				return
			}
			if err != nil {
				w.agent.event(w.pod, corev1.EventTypeWarning, "Unhealthy", fmt.Sprintf("%s probe of container %s failed: %v", kind, run.spec.Name, err))
			}
			if changed {
				report(ok)
			}
		})
		pause := period
		if err != nil && kind != "Readiness" {
			pause = load.Scale(period)
		}
		if kind == "Startup" && ok || !sleep(ctx, pause) {
			return
		}
	}
}

// verdict derives the health of a container from single probe results.
type verdict struct {
	success, failure int // thresholds
	known, ok        bool
	last             bool
	run              int // number of equal results in a row
}

func newVerdict(success, failure int) *verdict { return &verdict{success: success, failure: failure} }

// add records one result. It returns whether the verdict has changed, and the verdict. The first verdict counts as a
// change.
func (v *verdict) add(result bool) (changed, ok bool) {
	if result == v.last && v.run > 0 {
		v.run++
	} else {
		v.last, v.run = result, 1
	}
	threshold := v.failure
	if result {
		threshold = v.success
	}
	if v.run < threshold || v.known && v.ok == result {
		return false, v.ok
	}
	v.known, v.ok = true, result
	return true, result
}

func probeOnce(ctx context.Context, c *corev1.Container, p *corev1.Probe, podIP string, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if p.HTTPGet != nil {
		return httpGet(ctx, c, p.HTTPGet, podIP, http.StatusBadRequest)
	}
	port, err := portNumber(c, p.TCPSocket.Port)
	if err != nil {
		return err
	}
	host := p.TCPSocket.Host
	if host == "" {
		host = podIP
	}
	connection, err := new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(port)))
	if err != nil {
		return err
	}
	return connection.Close()
}

// httpGet sends the HTTP request of a probe or hook. A status code outside 200 to limit-1 is an error.
func httpGet(ctx context.Context, c *corev1.Container, get *corev1.HTTPGetAction, podIP string, limit int) error {
	port, err := portNumber(c, get.Port)
	if err != nil {
		return err
	}
	host := get.Host
	if host == "" {
		host = podIP
	}
	scheme := "http"
	if get.Scheme == corev1.URISchemeHTTPS {
		scheme = "https"
	}
	target, err := url.Parse(get.Path)
	if err != nil {
		return err
	}
	target.Scheme, target.Host = scheme, net.JoinHostPort(host, strconv.Itoa(port))
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, target.String(), nil)
	if err != nil {
		return err
	}
	request.Header.Set("User-Agent", "kube-probe/local")
	for _, h := range get.HTTPHeaders {
		if http.CanonicalHeaderKey(h.Name) == "Host" {
			request.Host = h.Value
		}
		request.Header.Add(h.Name, h.Value)
	}
	response, err := probeClient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(response.Body, 10<<10))
	if response.StatusCode < http.StatusOK || response.StatusCode >= limit {
		return fmt.Errorf("HTTP probe failed with statuscode: %d", response.StatusCode)
	}
	return nil
}

// portNumber returns the number of a numeric or named port.
func portNumber(c *corev1.Container, port intstr.IntOrString) (int, error) {
	if port.Type == intstr.Int {
		return port.IntValue(), nil
	}
	for _, p := range c.Ports {
		if p.Name == port.StrVal {
			return int(p.ContainerPort), nil
		}
	}
	return 0, fmt.Errorf("container %s has no port named %q", c.Name, port.StrVal)
}

// sleep waits for d. It returns false if ctx ends first.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
