package router

import (
	"errors"
	"net/http"
	"time"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/expertload"
	"github.com/semmoe/operator/internal/router/jsonscan"
	"github.com/semmoe/operator/internal/router/wire"
)

// HeaderRequestID identifies a request; the router gives one to a request that has none.
const HeaderRequestID = "X-Request-Id"

// sampled reports whether a request with this random number is in the sample. The router draws the number, so neither
// load nor rank nor client biases the sample.
func sampled(random uint64, percent int) bool { return random%100 < uint64(percent) }

const (
	// maxExpertBytes is the maximum size of the routed experts of a sampled request. A prompt of 128 Ki tokens has
	// hundreds of megabytes of them in base64. The router holds a complete response in memory until it is counted,
	// about 2.5 times its size.
	maxExpertBytes = 64 << 20
	// maxReservedBytes is the maximum size of the routed experts of all sampled requests in flight. With the decoded
	// data they stay below the memory limit of a router.
	maxReservedBytes = 128 << 20
)

// expertBytes estimates the size of the routed experts in a response, in bytes. Each answer repeats the experts of the
// prompt. In base64, each token, layer and expert takes 4 bytes * 4/3.
func expertBytes(r *request, lease *Lease) int64 {
	shape, tokens := lease.Backend.Shape, r.tokens
	if shape == nil { // the response cannot be decoded
		return 0
	}
	if lease.scored {
		tokens = r.forecast.tokens
	}
	rows := (tokens-r.output)*r.copies + min(r.output, r.answers*r.answerTokens)
	// The minimum prevents an overflow: clients control the factors. One byte per token would exceed the limit already.
	return min(rows, maxExpertBytes) * int64(shape.Layers*shape.ExpertsPerToken) * 16 / 3
}

// reserve reserves memory for a sampled request until its lease is released; bytes is the total of the request. It
// reports false and reserves nothing more if the total exceeds the limit of a request or of all requests.
func (o *Observations) reserve(l *Lease, bytes int64) bool {
	more := max(0, bytes-l.reserved)
	if bytes > maxExpertBytes {
		return false
	}
	if o.addReserved(l, more) > maxReservedBytes && more > 0 {
		o.addReserved(l, -more)
		return false
	}
	return true
}

// addReserved adds to the memory reserved for a request without a check. It returns the total of all requests.
func (o *Observations) addReserved(l *Lease, more int64) int64 {
	l.reserved += more
	l.releaseReserved = func() {
		o.reserved.Add(-l.reserved)
		l.reserved = 0
	}
	return o.reserved.Add(more)
}

// capture is the capture state of a request: what the router does to get its routed experts.
type capture struct {
	// sampled is true if the experts are counted. strips is true if the response may contain experts that the client
	// did not request, because the router requested them or the engine always sends them.
	sampled, strips bool
	// asks is true if the router changed the body to request the experts.
	asks bool
	// long is true if the experts would take too much memory. Such a request is not in the population of the sample.
	long bool
}

// refused reports whether a pod may have rejected a request because of the router's change to its body. A pod that was
// started before sampling was enabled cannot report experts and may reject the field.
func (l capture) refused(response *http.Response) bool {
	return l.asks && (response.StatusCode == http.StatusBadRequest || response.StatusCode == http.StatusUnprocessableEntity)
}

// capture requests the routed experts from the engine if the request is sampled on the pod of the lease.
func (s *sender) requestExperts(r *request, body []byte, lease *Lease) (asked []byte, _ capture) {
	engine := lease.Backend.Adapter(s.engine).RoutedExperts
	if engine.Decode == nil || !r.reportsExperts {
		return body, capture{}
	}
	size := expertBytes(r, lease)
	long := size > maxExpertBytes
	chosen := r.sampled && !long && !lease.spread && s.observations.samples(s.pool, lease.Backend)
	if !chosen && !engine.Unrequested {
		return body, capture{long: long}
	}
	asked, ok := wire.AddFlag(body, engine.RequestField)
	ok = ok || engine.Unrequested && !r.asksExperts // an engine that sends experts unasked sends them to clients that decline them too
	// The changed body is a copy in addition to the client's body. It is released when the response arrives.
	chosen = chosen && ok && s.observations.reserve(lease, max(size, int64(len(asked))))
	if !chosen {
		asked = body // the changed body is sent anyway: vLLM with the plug-in sends experts only if the field is set
	}
	return asked, capture{sampled: chosen, strips: chosen || ok && engine.Unrequested, asks: chosen && !engine.Unrequested, long: long}
}

// limitCapture checks the size of a response that declares its length. A response that does not fit into the memory for
// samples is neither counted nor read. The client gets it unchanged.
func (s *sender) limitCapture(response *http.Response, lease *Lease, done capture) capture {
	if length := wire.Length(response); done.strips && !wire.IsStream(response) && !s.observations.reserve(lease, length) {
		done.long = done.long || done.sampled
		done.sampled, done.strips = false, false
		s.observations.givenUp.Inc()
	}
	return done
}

// countEligible counts an answered request in the population of the sample. It also records the response time to
// measure the cost of capture.
func (s *sender) countEligible(response *http.Response, r *request, lease *Lease, capture capture, sent time.Time) {
	engine := lease.Backend.Adapter(s.engine).RoutedExperts
	if engine.Decode == nil || !r.reportsExperts || r.asksExperts || r.shifted || lease.spread || response.StatusCode != http.StatusOK || !s.observations.samples(s.pool, lease.Backend) {
		return
	}
	if engine.NonStreamingOnly && wire.IsStream(response) {
		if capture.sampled {
			lease.releaseReserved()
		}
		s.observations.addStreamed()
		return
	}
	if capture.long {
		s.observations.addLong()
		return
	}
	s.observations.addEligible(capture.sampled)
	if !engine.Unrequested && s.options.SamplePercent > 0 {
		s.observations.timed(response, sent, capture.sampled, lease.tokens)
	}
}

// responseCapture removes routed experts that the client did not request from a response, and counts them.
type responseCapture struct {
	engine       engine.RoutedExperts
	observations *Observations
	lease        *Lease
	// request is the request that was sent. Its forecast is observed, and live samples need its prompt.
	request *request
	// sampled is true if the experts are counted. Experts in other responses are removed only.
	sampled bool

	// tokens contains the token counts and ids of the response, experts the decoded experts.
	tokens  wire.Usage
	experts []int32
}

// wrap removes the routed experts from the response, and every event that carries nothing else.
func (m *responseCapture) wrap(response *http.Response) error {
	if m.engine.NonStreamingOnly && wire.IsStream(response) {
		return nil
	}
	found := ""
	edit := func(data []byte, event bool) ([]byte, error) {
		value, rest := m.take(data)
		if m.sampled && value != nil {
			found, _ = jsonscan.String(value)
		}
		switch {
		case event && value == nil:
			return data, nil
		case event && wire.IsEmptyEvent(rest):
			return nil, nil
		}
		return rest, nil
	}
	if err := wire.Rewrite(response, edit, func() { m.count(found) }, captureMemory{m}); err != nil {
		return err
	}
	if m.sampled { // a stream counts only if it is read to its end
		response.Body = &endedBody{ReadCloser: response.Body, end: func() { m.observations.countAsync(m.countTokens) }}
	}
	return nil
}

// captureMemory reserves the memory for the response of a meter.
type captureMemory struct{ *responseCapture }

func (r captureMemory) Reserve(bytes int64) bool { return r.observations.reserve(r.lease, bytes) }

func (r captureMemory) Release() { r.observations.addReserved(r.lease, -r.lease.reserved) }

// GiveUp counts a failed sample: the request was already counted as sampled.
func (r captureMemory) GiveUp() {
	r.observations.givenUp.Inc()
	if r.sampled {
		r.observations.failures.Inc()
	}
	r.sampled = false
}

// take removes the routed experts from JSON data, at every path that the engine uses. Several answers to one request
// start with the same prompt; found is the value of the first answer. It is a part of data, or nil if there is none.
func (m *responseCapture) take(data []byte) (found, rest []byte) {
	for _, path := range m.engine.ResponsePaths {
		values, without := wire.CutMembers(data, path)
		data = without
		for _, value := range values {
			if found == nil && len(value) > len(`""`) && value[0] == '"' {
				found = value
			}
		}
	}
	if m.sampled {
		m.tokens.Read(data)
	}
	return found, data
}

// count records the experts of a response. An unreadable value counts as a failed sample and does not affect the
// client.
func (m *responseCapture) count(text string) {
	if !m.sampled {
		return
	}
	observation, err := m.observe(text)
	if err != nil {
		m.observations.failures.Inc()
		return
	}
	m.observations.add(observation)
}

// errRankUnknown is returned if another rank than the chosen one may have served the request. The location of the
// experts is then unknown.
var errRankUnknown = errors.New("the rank that served the request is not known")

var errExpertsUnavailable = errors.New("the response or the metadata of its pod is incomplete")

// observe computes the observation for the placement that the pod serves under. It fails if the plan of the pod is not
// loaded.
func (m *responseCapture) observe(text string) (lar.Observation, error) {
	backend := m.lease.Backend
	if text == "" || backend.Shape == nil || m.lease.Rank == discovery.NoRank {
		return lar.Observation{}, errExpertsUnavailable
	}
	if reported := m.tokens.Rank; reported == nil && m.lease.knownRank() == discovery.NoRank || reported != nil && *reported != m.lease.Rank {
		return lar.Observation{}, errRankUnknown
	}
	shape := *backend.Shape
	experts, err := m.lease.logicalExperts(m.engine, text)
	if err != nil {
		return lar.Observation{}, err
	}
	m.experts = experts
	local, err := m.lease.locality()
	if err != nil {
		return lar.Observation{}, err
	}
	perExpert := expertload.NewCounts(shape)
	count, err := lar.CountExperts(experts, shape, local, perExpert)
	if err != nil {
		return lar.Observation{}, err
	}
	m.observations.experts.Add(backend.ModelDigest, shape, perExpert)
	observation := lar.Observation{Revision: backend.Revision, Plan: backend.PlanDigest, Rank: m.lease.Rank, Count: count}
	if m.lease.scored {
		observation.Forecast = m.request.forecast.on(m.lease.Rank)
	}
	return observation, nil
}

// locality returns which experts are local to the rank of the lease. The shape of the backend must be known.
func (l *Lease) locality() (lar.Locality, error) {
	switch {
	case l.Backend.PlanDigest == "":
		return lar.Contiguous(*l.Backend.Shape, l.Backend.Ranks, l.Rank)
	case l.layout == nil:
		return lar.Locality{}, errExpertsUnavailable
	}
	local, err := l.layout.Locality(*l.Backend.Shape, l.Backend.Ranks, l.Rank)
	// The engine applies its own copy rule, regardless of the rule of the plan.
	if own := l.Backend.Adapter(nil); own != nil {
		local.CopyRule = own.CopyRule
	}
	return local, err
}
