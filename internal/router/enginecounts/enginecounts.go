// SPDX-License-Identifier: Apache-2.0

package enginecounts

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/kube/printable"
	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/observation/stepsizes"
	"github.com/semmoe/operator/internal/router/discovery"
)

const (
	// Metric is the name of the activation counters.
	Metric = "semmoe_engine_activations_total"
	// TablesMetric names the plan whose tables an engine uses, RefusedMetric why it uses none of the present files.
	TablesMetric  = "semmoe_engine_tables_info"
	RefusedMetric = "semmoe_engine_tables_refused"
	// Period is the time between two readings of a pod.
	Period = lar.EngineBucketTime
	// window is the time over which counts are reported: the window of sampled requests, so that both rates follow the
	// traffic equally.
	window = lar.Buckets * lar.BucketTime

	readTimeout = 5 * time.Second
	readAtOnce  = 16
	// maxAnswer is the maximum size of a response, maxLine of one of its lines. Responses of vLLM have a few hundred
	// kilobytes.
	maxAnswer = 8 << 20
	maxLine   = 64 << 10
)

// Poller reads the counters of engine pods periodically. It is safe for concurrent use.
type Poller struct {
	// Backends returns the pods to read.
	Backends func() []discovery.Backend
	// Transport sends the requests to the pods.
	Transport http.RoundTripper
	// Now is the clock.
	Now func() time.Time

	mu   sync.Mutex
	pods map[string]*pod
	// buckets contains the counts of engines that shuffle tokens, oldest first.
	buckets []lar.EngineBucket
}

// pod contains the readings of a pod, oldest first.
type pod struct {
	address, revision string
	readings          []reading
	steps             podSteps
	// tables and refused are what the engine last reported about its tables. problem is why its counts are not used.
	tables, refused, problem string
	at                       time.Time // of the report about tables
}

type reading struct {
	at time.Time
	lar.Activations
}

// Run reads the pods once per Period until the context ends.
func (p *Poller) Run(ctx context.Context) {
	ticker := time.NewTicker(Period)
	defer ticker.Stop()
	for {
		p.Poll(ctx)
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// Poll reads each pod once.
func (p *Poller) Poll(ctx context.Context) {
	log := logr.FromContextOrDiscard(ctx)
	backends := p.Backends()
	p.keepOnly(backends)
	var reads errgroup.Group
	reads.SetLimit(readAtOnce)
	for _, b := range backends {
		reads.Go(func() error {
			got := p.read(ctx, b)
			if err := errors.Join(got.activationsErr, got.stepsErr); err != nil {
				log.V(1).Info("Cannot read all that an engine counts", "pod", b.Pod, "reason", err.Error())
			}
			p.add(b, got)
			return nil
		})
	}
	_ = reads.Wait() // none returns an error
}

// Counts returns the activations of each pod between the oldest and the newest reading in the window. It omits pods
// with a newest reading older than two periods.
func (p *Poller) Counts() []lar.EngineCounts {
	p.mu.Lock()
	defer p.mu.Unlock()
	var counts []lar.EngineCounts
	for name, pod := range p.pods {
		of := lar.EngineCounts{Pod: name, Revision: pod.revision, Tables: pod.tables, Refused: pod.refused, Problem: pod.problem}
		if p.Now().Sub(pod.at).Abs() > 2*Period {
			continue
		}
		if len(pod.readings) < 2 || pod.problem != "" {
			if of.Problem != "" || of.Tables != "" || of.Refused != "" {
				counts = append(counts, of)
			}
			continue
		}
		first, last := pod.readings[0], pod.readings[len(pod.readings)-1]
		of.Activations = lar.Activations{Local: last.Local - first.Local, Total: last.Total - first.Total}
		counts = append(counts, of)
	}
	return counts
}

// Buckets returns the counts of engines that shuffle tokens over time, oldest first.
func (p *Poller) Buckets() []lar.EngineBucket {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.buckets)
}

// addBucket adds the activations of a pod between two readings to the bucket of the present.
func (p *Poller) addBucket(of *pod, counted lar.Activations, now time.Time) {
	start := now.Truncate(lar.EngineBucketTime).UTC()
	oldest := start.Add(-(lar.EngineBuckets - 1) * lar.EngineBucketTime)
	p.buckets = slices.DeleteFunc(p.buckets, func(b lar.EngineBucket) bool { return b.Start.Before(oldest) || b.Start.After(start) })
	at := slices.IndexFunc(p.buckets, func(b lar.EngineBucket) bool {
		return b.Start.Equal(start) && b.Revision == of.revision && b.Tables == of.tables
	})
	if at < 0 {
		at = len(p.buckets)
		p.buckets = append(p.buckets, lar.EngineBucket{Start: start, Revision: of.revision, Tables: of.tables})
	}
	p.buckets[at].Local += counted.Local
	p.buckets[at].Total += counted.Total
}

// Steps returns the distribution of tokens per step of each pod with an engine that counts steps. It omits pods if
// their newest reading is older than two periods.
func (p *Poller) Steps() []stepsizes.Pod {
	p.mu.Lock()
	defer p.mu.Unlock()
	var pods []stepsizes.Pod
	for name, pod := range p.pods {
		s := &pod.steps
		reported := stepsizes.Pod{Pod: name, Revision: pod.revision, Problem: s.problem}
		if s.problem == "" && (s.last == nil || p.Now().Sub(s.at).Abs() > 2*Period) {
			continue
		}
		if s.problem == "" {
			reported.Sizes, reported.Steps, reported.PrefillShare = s.histogram.Sizes(), min(s.histogram.Steps(), stepsizes.MaxSteps), s.histogram.PrefillShare()
		}
		pods = append(pods, reported)
	}
	return pods
}

// keepOnly drops pods that are no longer backends, or that were replaced by a pod with the same name.
func (p *Poller) keepOnly(backends []discovery.Backend) {
	p.mu.Lock()
	defer p.mu.Unlock()
	kept := map[string]*pod{}
	for _, b := range backends {
		if old := p.pods[b.Pod]; old != nil && old.address == b.Address && old.revision == b.Revision {
			kept[b.Pod] = old
		}
	}
	p.pods = kept
}

// add records the readings of a pod.
func (p *Poller) add(b discovery.Backend, got answer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	of := p.pods[b.Pod]
	if of == nil {
		of = &pod{address: b.Address, revision: b.Revision}
		p.pods[b.Pod] = of
	}
	switch nonsense := (*nonsenseError)(nil); {
	case got.activationsErr == nil:
		if got.tables != of.tables { // the counts mix two tables
			of.readings = nil
		}
		of.tables, of.refused, of.problem, of.at = got.tables, got.refused, "", p.Now()
		if counted := of.addActivations(got.activations, p.Now()); counted.Total > 0 && of.tables != "" {
			p.addBucket(of, counted, p.Now())
		}
	case errors.As(got.activationsErr, &nonsense):
		of.readings, of.at, of.problem = nil, p.Now(), printable.Line(nonsense.Error(), lar.MaxEngineProblem)
	}
	switch {
	case got.stepsErr != nil:
		of.steps.problem = printable.Line(got.stepsErr.Error(), stepsizes.MaxProblem)
	case got.steps != nil:
		of.steps.add(got.steps, p.Now())
	}
}

// addActivations appends a reading, and returns the activations since the previous one. If a counter has decreased, the
// engine was restarted, or reports nonsense: earlier readings are dropped, and the problem is reported until the next
// reading.
func (of *pod) addActivations(counts lar.Activations, now time.Time) (counted lar.Activations) {
	if n := len(of.readings); n > 0 {
		last := of.readings[n-1]
		switch {
		case counts.Local < last.Local || counts.Total-counts.Local < last.Total-last.Local:
			of.problem = Metric + " has decreased: the engine was restarted, or does not count correctly"
			of.readings = nil
		case now.Before(last.at):
			of.readings = nil
		default:
			counted = lar.Activations{Local: counts.Local - last.Local, Total: counts.Total - last.Total}
		}
	}
	for len(of.readings) > 0 && now.Sub(of.readings[0].at) > window {
		of.readings = of.readings[1:]
	}
	of.readings = append(of.readings, reading{now, counts})
	return counted
}

// errAbsent is returned for an engine that does not count activations.
var errAbsent = errors.New("the response does not contain " + Metric)

// nonsenseError is returned for counts that cannot be true.
type nonsenseError struct{ message string }

func (e *nonsenseError) Error() string { return e.message }

func nonsense(format string, args ...any) error { return &nonsenseError{fmt.Sprintf(format, args...)} }

// answer contains the readings of a pod. It has neither steps nor stepsErr if the engine counts no steps.
type answer struct {
	activations    lar.Activations
	activationsErr error
	// tables and refused are the labels of TablesMetric and RefusedMetric; empty without the metric.
	tables, refused string
	steps           map[string]*rankSteps
	stepsErr        error
}

func (p *Poller) read(ctx context.Context, b discovery.Backend) answer {
	var unnamed engine.Adapter
	metrics := b.Adapter(&unnamed).StepMetrics
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	body, err := p.get(ctx, b.URL("/metrics"))
	if err != nil {
		failed := answer{activationsErr: err}
		if metrics != nil {
			failed.stepsErr = stable(err)
		}
		return failed
	}
	defer body.Close()
	return parse(body, metrics)
}

// statusError is returned for a response without metrics.
type statusError int

func (s statusError) Error() string { return fmt.Sprintf("/metrics answers %d", int(s)) }

// stable removes details that change between readings, such as the ports of a connection, from an error, because the
// error is reported in status.
func stable(err error) error {
	if status := statusError(0); err == nil || errors.As(err, &status) || errors.Is(err, bufio.ErrTooLong) {
		return err
	}
	return errors.New("failed to read /metrics")
}

func (p *Poller) get(ctx context.Context, url string) (io.ReadCloser, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	response, err := p.Transport.RoundTrip(request)
	if err != nil {
		return nil, err
	}
	if response.StatusCode != http.StatusOK {
		response.Body.Close()
		return nil, statusError(response.StatusCode)
	}
	return response.Body, nil
}

// parse reads counters from Prometheus' text exposition format: activations, and steps unless metrics is nil. An error
// in one group does not affect the other.
func parse(text io.Reader, metrics *engine.StepMetrics) (got answer) {
	limited := &io.LimitedReader{R: text, N: maxAnswer + 1}
	lines := bufio.NewScanner(limited)
	lines.Buffer(nil, maxLine)
	steps := &stepReader{metrics: metrics, ranks: map[string]*rankSteps{}, series: map[string]bool{}}
	found, series := false, map[string]bool{}
	for lines.Scan() {
		if metrics != nil && got.stepsErr == nil {
			got.stepsErr = steps.line(lines.Bytes())
		}
		if got.activationsErr == nil {
			got.activationsErr = cmp.Or(
				addState(&got.tables, lines.Bytes(), TablesMetric, tablesLabel), addState(&got.refused, lines.Bytes(), RefusedMetric, refusedLabel))
		}
		labels, ok := bytes.CutPrefix(lines.Bytes(), []byte(Metric+"{"))
		if ok && got.activationsErr == nil {
			got.activationsErr = addActivations(&got.activations, labels, series)
			found = true
		}
	}
	err, unread := lines.Err(), stable(lines.Err())
	if err == nil && limited.N == 0 {
		err = fmt.Errorf("the response has more than %d MiB", maxAnswer>>20)
		unread = err
	}
	if got.activationsErr = cmp.Or(err, got.activationsErr); got.activationsErr == nil && !found {
		got.activationsErr = errAbsent
	}
	if metrics == nil {
		return got
	}
	if got.stepsErr = cmp.Or(unread, got.stepsErr); got.stepsErr == nil {
		got.steps, got.stepsErr = steps.read()
	}
	return got
}

// tablesLabel and refusedLabel match the label of a state.
var (
	tablesLabel  = regexp.MustCompile(`\bplan_digest="([0-9a-f]{64})"`)
	refusedLabel = regexp.MustCompile(`\breason="([A-Za-z]{1,64})"`)
)

// addState sets state to the label of a line of a metric with the value 1. The value 0 is equal to an absent line.
func addState(state *string, line []byte, metric string, label *regexp.Regexp) error {
	labels, ok := bytes.CutPrefix(line, []byte(metric+"{"))
	if !ok {
		return nil
	}
	value, err := valueOf(metric, labels)
	if err != nil || value == 0 {
		return err
	}
	match := label.FindSubmatch(labels)
	switch {
	case match == nil || value != 1:
		return nonsense("%s{%.100q is invalid: %s must have the value 1", metric, labels, label)
	case *state != "" && *state != string(match[1]):
		return nonsense("%s has several values: %.64s and %.64s", metric, *state, match[1])
	}
	*state = string(match[1])
	return nil
}

// addActivations adds the value of a counter. text is the line after the opening brace. series contains the counters that
// were added: one that is exposed twice would count twice.
func addActivations(sum *lar.Activations, text []byte, series map[string]bool) error {
	count, err := valueOf(Metric, text)
	if err != nil {
		return err
	}
	labels := string(text[:max(0, bytes.LastIndexByte(text, '}'))])
	locality, err := take(&labels, "locality")
	if err != nil {
		return nonsense("%s: %v", Metric, err)
	}
	name := locality + "," + labels
	switch {
	case locality != "local" && locality != "remote":
		return nonsense("%s{%.100q has no label locality of local or remote", Metric, text)
	case series[name]:
		return nonsense("%s{%.100q occurs twice", Metric, text)
	case locality == "local":
		sum.Local += count
	}
	series[name] = true
	if sum.Total += count; sum.Total > lar.MaxActivations {
		return nonsense("%s counts more than %d", Metric, int64(lar.MaxActivations))
	}
	return nil
}

// valueOf parses the value after the labels. A timestamp may follow it.
func valueOf(metric string, line []byte) (int64, error) {
	fields := bytes.Fields(line[bytes.LastIndexByte(line, '}')+1:])
	if len(fields) == 0 {
		return 0, nonsense("%s{%.100q has no value", metric, line)
	}
	value, err := strconv.ParseFloat(string(fields[0]), 64)
	if err != nil || !(value >= 0 && value <= lar.MaxActivations) {
		return 0, nonsense("%s: value %.40q is invalid: it must be a number from 0 to %d", metric, fields[0], int64(lar.MaxActivations))
	}
	return int64(value), nil
}
