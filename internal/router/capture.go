package router

import (
	"io"
	"net/http"
	"time"

	"github.com/semmoe/operator/internal/lar"
	"github.com/semmoe/operator/internal/router/discovery"
)

const (
	// dearCapture is the ratio of times per token from which capture costs too much to be done on every pod.
	dearCapture = 1.05
	// narrowTime is how long only one pod of each plan is sampled after capture was last found too dear.
	narrowTime = time.Hour
	// lookPeriod is how often the cost is looked at: the fewer looks, the fewer false alarms.
	lookPeriod = time.Minute
	// costBucket and costBuckets are what the cost is measured over: an hour.
	costBucket  = 5 * time.Minute
	costBuckets = 12
)

// captureWatch measures what it costs that an engine is asked for the routed experts, and narrows the sample down to one
// pod where that is too much. It is not safe for concurrent use.
type captureWatch struct {
	// compares tells that there is something to compare: the engine tells the experts of those requests only that ask.
	compares bool
	buckets  []timedCost // the oldest first
	// nextLook is when the cost is looked at again, narrowUntil until when one pod is sampled.
	nextLook, narrowUntil time.Time
}

type timedCost struct {
	start time.Time
	lar.CaptureCost
}

// add counts a request that took that long for that many tokens.
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
	if now.Before(c.nextLook) {
		return
	}
	c.nextLook = now.Add(lookPeriod)
	if cost := c.cost(now); cost.Above(dearCapture) {
		c.narrowUntil = now.Add(narrowTime)
	}
}

// cost is the sum of the last hour.
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

// narrowed reports whether only one pod of each plan is sampled.
func (c *captureWatch) narrowed(now time.Time) bool { return now.Before(c.narrowUntil) }

// samples reports whether requests to a backend are sampled. While capture is too dear, those to one pod of each plan are:
// the same one for every router. Which pod a request goes to does not depend on whether it is in the sample, so that stays
// one of all requests to that pod.
func (o *Observations) samples(pool *Pool, b discovery.Backend) bool {
	o.mu.Lock()
	narrowed := o.capture.narrowed(o.now())
	o.mu.Unlock()
	return !narrowed || pool.sampledPod(b.PlanDigest) == b.Pod
}

// sampledPod is the pod of a plan whose name has the smallest hash; empty where no pod has the plan.
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

// podHash orders pods in the same way on every router.
func podHash(name string) uint64 {
	hash := uint64(14695981039346656037)
	for i := range len(name) {
		hash = (hash ^ uint64(name[i])) * 1099511628211
	}
	hash = (hash ^ hash>>30) * 0xbf58476d1ce4e5b9
	hash = (hash ^ hash>>27) * 0x94d049bb133111eb
	return hash ^ hash>>31
}

// timed has a response's time counted once it has been read to its end; one whose client leaves before does not count.
func (o *Observations) timed(response *http.Response, sent time.Time, asked bool, tokens int64) {
	response.Body = &endedBody{ReadCloser: response.Body, end: func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		now := o.now()
		o.capture.add(now, asked, now.Sub(sent), tokens)
	}}
}

// endedBody calls end when it has been read to its end.
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
