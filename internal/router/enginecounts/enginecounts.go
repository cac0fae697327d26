package enginecounts

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"

	"github.com/semmoe/operator/internal/lar"
	"github.com/semmoe/operator/internal/router/discovery"
)

const (
	// Metric is the name of the counters.
	Metric = "semmoe_engine_activations_total"
	// Period is the time between two readings of a pod.
	Period = 30 * time.Second
	// window is the time over which counts are reported: that of sampled requests, by which rates follow the traffic.
	window = lar.Buckets * lar.BucketTime

	readTimeout = 5 * time.Second
	readAtOnce  = 16
	// maxAnswer bounds an answer, and maxLine one of its lines. vLLM's are a few hundred kilobytes.
	maxAnswer = 8 << 20
	maxLine   = 64 << 10
)

// Poller reads the counters of engine pods again and again. It is safe for concurrent use.
type Poller struct {
	// Backends returns the pods to read.
	Backends func() []discovery.Backend
	// Transport reaches the pods.
	Transport http.RoundTripper
	// Now is the clock.
	Now func() time.Time

	mu   sync.Mutex
	pods map[string]*pod
}

// pod is what was read of a pod, the oldest first.
type pod struct {
	address, revision string
	readings          []reading
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
			counts, err := p.read(ctx, b)
			if err != nil {
				log.V(1).Info("Cannot read the activations that an engine counts", "pod", b.Pod, "reason", err.Error())
				return nil
			}
			p.add(b, counts)
			return nil
		})
	}
	_ = reads.Wait() // none returns an error
}

// Counts returns the activations of each pod between the oldest and the newest reading in the window. A pod whose newest reading is old
// is left out.
func (p *Poller) Counts() []lar.EngineCounts {
	p.mu.Lock()
	defer p.mu.Unlock()
	var counts []lar.EngineCounts
	for name, pod := range p.pods {
		if len(pod.readings) < 2 {
			continue
		}
		first, last := pod.readings[0], pod.readings[len(pod.readings)-1]
		if p.Now().Sub(last.at).Abs() > 2*Period {
			continue
		}
		counts = append(counts, lar.EngineCounts{
			Pod: name, Revision: pod.revision,
			Activations: lar.Activations{Local: last.Local - first.Local, Total: last.Total - first.Total},
		})
	}
	return counts
}

// keepOnly forgets the pods that are no backends any more, or other ones by the same name.
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

// add keeps a reading. Counters that fell are those of an engine that was restarted: what was read before is forgotten.
func (p *Poller) add(b discovery.Backend, counts lar.Activations) {
	p.mu.Lock()
	defer p.mu.Unlock()
	of := p.pods[b.Pod]
	if of == nil {
		of = &pod{address: b.Address, revision: b.Revision}
		p.pods[b.Pod] = of
	}
	now := p.Now()
	if n := len(of.readings); n > 0 {
		last := of.readings[n-1]
		if counts.Local < last.Local || counts.Total-counts.Local < last.Total-last.Local || now.Before(last.at) {
			of.readings = nil
		}
	}
	for len(of.readings) > 0 && now.Sub(of.readings[0].at) > window {
		of.readings = of.readings[1:]
	}
	of.readings = append(of.readings, reading{now, counts})
}

// errAbsent is of an engine that does not count activations.
var errAbsent = errors.New("it has no " + Metric)

func (p *Poller) read(ctx context.Context, b discovery.Backend) (lar.Activations, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+b.Address+"/metrics", nil)
	if err != nil {
		return lar.Activations{}, err
	}
	response, err := p.Transport.RoundTrip(request)
	if err != nil {
		return lar.Activations{}, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return lar.Activations{}, errors.New(response.Status)
	}
	return parse(response.Body)
}

// parse sums the counters in a text of Prometheus' exposition format.
func parse(text io.Reader) (lar.Activations, error) {
	limited := &io.LimitedReader{R: text, N: maxAnswer + 1}
	lines := bufio.NewScanner(limited)
	lines.Buffer(nil, maxLine)
	var sum lar.Activations
	found := false
	for lines.Scan() {
		labels, ok := bytes.CutPrefix(lines.Bytes(), []byte(Metric+"{"))
		if !ok {
			continue
		}
		count, err := valueOf(labels)
		if err != nil {
			return lar.Activations{}, err
		}
		switch {
		case bytes.Contains(labels, []byte(`locality="local"`)):
			sum.Local += count
		case !bytes.Contains(labels, []byte(`locality="remote"`)):
			return lar.Activations{}, fmt.Errorf("%s{%.100q has no label locality of local or remote", Metric, labels)
		}
		if sum.Total += count; sum.Total > lar.MaxActivations {
			return lar.Activations{}, fmt.Errorf("%s counts more than %d", Metric, int64(lar.MaxActivations))
		}
		found = true
	}
	switch {
	case lines.Err() != nil:
		return lar.Activations{}, lines.Err()
	case limited.N == 0:
		return lar.Activations{}, fmt.Errorf("the answer has more than %d MiB", maxAnswer>>20)
	case !found:
		return lar.Activations{}, errAbsent
	}
	return sum, nil
}

// valueOf reads the value behind the labels, which a time may follow.
func valueOf(line []byte) (int64, error) {
	fields := bytes.Fields(line[bytes.LastIndexByte(line, '}')+1:])
	if len(fields) == 0 {
		return 0, fmt.Errorf("%s{%.100q has no value", Metric, line)
	}
	value, err := strconv.ParseFloat(string(fields[0]), 64)
	if err != nil || !(value >= 0 && value <= lar.MaxActivations) {
		return 0, fmt.Errorf("%s is %.40q: a number from 0 to %d is expected", Metric, fields[0], int64(lar.MaxActivations))
	}
	return int64(value), nil
}
