// SPDX-License-Identifier: Apache-2.0

package router

import (
	"io"
	"net/http"
	"time"

	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/router/discovery"
)

const (
	// maxCaptureCost is the ratio of times per token above which capture is too expensive to run on every pod.
	maxCaptureCost = 1.05
	// narrowPeriod is the time for which only one pod per plan is sampled after capture was last found too expensive.
	narrowPeriod = time.Hour
	// costCheckPeriod is the time between two evaluations of the cost. Fewer evaluations cause fewer false alarms.
	costCheckPeriod = time.Minute
	// costBucket and costBuckets define the measurement window of the cost: one hour.
	costBucket  = 5 * time.Minute
	costBuckets = 12
)

// captureWatch measures the cost of requesting routed experts from an engine. It limits the sample to one pod per plan
// while the cost is too high. It is not safe for concurrent use.
type captureWatch struct {
	// compares is true if the cost can be measured: the engine reports experts only for requests that ask for them.
	compares bool
	buckets  []timedCost // the oldest first
	// nextCheck is the time of the next evaluation. Until narrowUntil, one pod per plan is sampled.
	nextCheck, narrowUntil time.Time
}

type timedCost struct {
	start time.Time
	lar.CaptureCost
}

// add records the response time of a request with this number of tokens. asked is true if the router requested its
// experts.
func (c *captureWatch) add(now time.Time, asked bool, took time.Duration, tokens int64) {
	start := now.Truncate(costBucket)
	if n := len(c.buckets); n == 0 || c.buckets[n-1].start.Before(start) {
		c.buckets = append(c.buckets, timedCost{start: start})
	}
	into := &c.buckets[len(c.buckets)-1].Plain
	if asked {
		into = &c.buckets[len(c.buckets)-1].Asked
	}
	into.Add(took.Seconds(), float64(tokens))
	if now.Before(c.nextCheck) {
		return
	}
	c.nextCheck = now.Add(costCheckPeriod)
	if cost := c.cost(now); cost.Above(maxCaptureCost) {
		c.narrowUntil = now.Add(narrowPeriod)
	}
}

// cost returns the sum over the last hour.
func (c *captureWatch) cost(now time.Time) lar.CaptureCost {
	for len(c.buckets) > 0 && now.Sub(c.buckets[0].start) >= costBuckets*costBucket {
		c.buckets = c.buckets[1:]
	}
	var sum lar.CaptureCost
	for _, bucket := range c.buckets {
		sum.Merge(bucket.CaptureCost)
	}
	return sum
}

// narrowed reports whether only one pod per plan is sampled.
func (c *captureWatch) narrowed(now time.Time) bool { return now.Before(c.narrowUntil) }

// samples reports whether requests to a backend are sampled. While capture is too expensive, only one pod per plan is
// sampled, the same pod on every router. The choice of a pod does not depend on whether a request is in the sample, so
// the sample represents all requests to that pod.
func (o *Observations) samples(pool *Pool, b discovery.Backend) bool {
	o.mu.Lock()
	narrowed := o.capture.narrowed(o.now())
	o.mu.Unlock()
	return !narrowed || pool.sampledPod(b.PlanDigest) == b.Pod
}

// sampledPod returns the pod of a plan with the smallest hash of its name, or "" if no pod has the plan.
func (p *Pool) sampledPod(plan string) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var pod string
	var least uint64
	for _, g := range p.groups {
		if g.plan != plan {
			continue
		}
		for _, b := range g.backends {
			if hash := podHash(b.Pod); pod == "" || hash < least {
				pod, least = b.Pod, hash
			}
		}
	}
	return pod
}

// podHash returns a hash that orders pods identically on every router.
func podHash(name string) uint64 {
	hash := uint64(14695981039346656037)
	for i := range len(name) {
		hash = (hash ^ uint64(name[i])) * 1099511628211
	}
	hash = (hash ^ hash>>30) * 0xbf58476d1ce4e5b9
	hash = (hash ^ hash>>27) * 0x94d049bb133111eb
	return hash ^ hash>>31
}

// timed records the time of a response when it has been read to its end. It ignores responses to clients that
// disconnect.
func (o *Observations) timed(response *http.Response, sent time.Time, asked bool, tokens int64) {
	response.Body = &endedBody{ReadCloser: response.Body, end: func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		now := o.now()
		o.capture.add(now, asked, now.Sub(sent), tokens)
	}}
}

// endedBody calls end once, when the body has been read to its end.
type endedBody struct {
	io.ReadCloser
	end func()
}

func (b *endedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err == io.EOF && b.end != nil {
		b.end()
		b.end = nil
	}
	return n, err
}
