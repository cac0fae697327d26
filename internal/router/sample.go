package router

import (
	"errors"
	"net/http"
	"time"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/jsonscan"
	"github.com/semmoe/operator/internal/lar"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/expertload"
	"github.com/semmoe/operator/internal/router/wire"
)

// HeaderRequestID identifies a request; the router gives one to a request that has none.
const HeaderRequestID = "X-Request-Id"

// sampled reports whether a request with a random number is in the sample. The number is the router's own, so that neither the load nor
// the rank nor the client biases the sample.
func sampled(lot uint64, percent int) bool { return lot%100 < uint64(percent) }

const (
	// longAnswer is how many bytes the routed experts of a sampled request may take: in base64 a prompt of 128 Ki tokens has hundreds of
	// megabytes of them. All of an answer is held until it is counted, about two and a half times over.
	longAnswer = 64 << 20
	// heldAtOnce bounds what they may take of all sampled requests that run: with what is made of them less than a router's memory.
	heldAtOnce = 128 << 20
)

// answerBytes is about how many bytes an engine takes to tell the experts of a request, a prompt's with each of its answers: in base64
// four for three bytes, and four bytes for each token, layer and expert.
func answerBytes(r *request, lease *Lease) int64 {
	shape, tokens := lease.Backend.Shape, r.tokens
	if shape == nil { // they cannot be counted
		return 0
	}
	if lease.scored {
		tokens = r.forecast.tokens
	}
	told := (tokens-r.output)*r.copies + min(r.output, r.answers*r.usual)
	// A byte for each would be too much already; the product of what a client may claim has no room for more.
	return min(told, longAnswer) * int64(shape.Layers*shape.ExpertsPerToken) * 16 / 3
}

// hold keeps so much memory in all for a sampled request until its lease is released; it reports false, and keeps no more, where that is
// too much, or others have too much of it.
func (o *Observations) hold(l *Lease, bytes int64) bool {
	more := max(0, bytes-l.held)
	if bytes > longAnswer {
		return false
	}
	if o.keep(l, more) > heldAtOnce && more > 0 {
		o.keep(l, -more)
		return false
	}
	return true
}

// keep keeps so much more memory for a request, whoever has the rest. It returns what is kept for all.
func (o *Observations) keep(l *Lease, more int64) int64 {
	l.held += more
	l.unhold = func() {
		o.held.Add(-l.held)
		l.held = 0
	}
	return o.held.Add(more)
}

// look is what the router does to know the experts of a request to a pod.
type look struct {
	// sampled tells that the experts are counted, strips that the response may have some that are not the client's: those that
	// were asked for, or that the engine tells unasked.
	sampled, strips bool
	// asks tells that the body was changed to ask for them.
	asks bool
	// long tells that they would take too much memory: such a request is not in the population that the sample is drawn from.
	long bool
}

// refused tells that a pod may have refused a request for what the router has put into its body: one that was started before its
// deployment was to be sampled cannot tell, and may say so.
func (l look) refused(response *http.Response) bool {
	return l.asks && (response.StatusCode == http.StatusBadRequest || response.StatusCode == http.StatusUnprocessableEntity)
}

// look asks the engine for the routed experts of a request that is sampled on the lease's pod.
func (s *sender) look(r *request, body []byte, lease *Lease) (asked []byte, _ look) {
	engine := lease.Backend.Adapter(s.engine).RoutedExperts
	if engine.Decode == nil || !r.reportsExperts {
		return body, look{}
	}
	size := answerBytes(r, lease)
	long := size > longAnswer
	chosen := r.sampled && !long && !lease.spread && s.observations.samples(s.pool, lease.Backend)
	if !chosen && !engine.Unasked {
		return body, look{long: long}
	}
	asked, ok := wire.Ask(body, engine.RequestField)
	ok = ok || engine.Unasked && !r.asksExperts // whoever declines is told them as well
	// The changed body is one more beside the client's, and gone when the answer comes.
	chosen = chosen && ok && s.observations.hold(lease, max(size, int64(len(asked))))
	if !chosen {
		asked = body // an engine that answers unasked is asked all the same: with the plug-in for vLLM it answers only then
	}
	return asked, look{sampled: chosen, strips: chosen || ok && engine.Unasked, asks: chosen && !engine.Unasked, long: long}
}

// measured is what is done with an answer that tells its size: an answer that does not fit into the memory for samples is neither counted
// nor read, and its client gets it as it is.
func (s *sender) measured(response *http.Response, lease *Lease, done look) look {
	if length := wire.Length(response); done.strips && !wire.IsStream(response) && !s.observations.hold(lease, length) {
		done.long = done.long || done.sampled
		done.sampled, done.strips = false, false
		s.observations.givenUp.Inc()
	}
	return done
}

// survey counts an answered request among those that the sample is drawn from, and has its time compared with that of
// others.
func (s *sender) survey(response *http.Response, r *request, lease *Lease, look look, sent time.Time) {
	engine := lease.Backend.Adapter(s.engine).RoutedExperts
	if engine.Decode == nil || !r.reportsExperts || r.asksExperts || r.shifted || lease.spread || response.StatusCode != http.StatusOK || !s.observations.samples(s.pool, lease.Backend) {
		return
	}
	if engine.UnstreamedOnly && wire.IsStream(response) {
		if look.sampled {
			lease.unhold()
		}
		s.observations.addStreamed()
		return
	}
	if look.long {
		s.observations.addLong()
		return
	}
	s.observations.addEligible(look.sampled)
	if !engine.Unasked && s.options.SamplePercent > 0 {
		s.observations.timed(response, sent, look.sampled, lease.tokens)
	}
}

// meter takes the routed experts out of a response that the client did not ask them for, and counts them.
type meter struct {
	engine       engine.RoutedExperts
	observations *Observations
	lease        *Lease
	// request is what was sent: its forecast is observed, and its prompt is what live samples need.
	request *request
	// sampled tells that they are counted; those of other responses are only taken out.
	sampled bool

	// tokens is what the response tells of its tokens, experts the decoded experts.
	tokens  wire.Told
	experts []int32
}

// wrap makes the response the client's: without the routed experts, and without an event that carries nothing else.
func (m *meter) wrap(response *http.Response) error {
	if m.engine.UnstreamedOnly && wire.IsStream(response) {
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
		case event && wire.CarriesNothing(rest):
			return nil, nil
		}
		return rest, nil
	}
	if err := wire.Rewrite(response, edit, func() { m.count(found) }, answerRoom{m}); err != nil {
		return err
	}
	if m.sampled { // and, where it is a stream, not given up before its end
		response.Body = &endedBody{ReadCloser: response.Body, end: func() { m.observations.aside(m.countTokens) }}
	}
	return nil
}

// answerRoom is the memory in which a meter's answer is held.
type answerRoom struct{ *meter }

func (r answerRoom) Hold(bytes int64) bool { return r.observations.hold(r.lease, bytes) }

func (r answerRoom) Release() { r.observations.keep(r.lease, -r.lease.held) }

// GiveUp counts a sample that failed: by then the request counts among those that are sampled.
func (r answerRoom) GiveUp() {
	r.observations.givenUp.Inc()
	if r.sampled {
		r.observations.failures.Inc()
	}
	r.sampled = false
}

// take cuts the routed experts out of JSON, wherever the engine puts them. Of several answers to a request, which all
// begin with its prompt, the first one's are found: a part of data, nil where there are none.
func (m *meter) take(data []byte) (found, rest []byte) {
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

// count counts what a response told; an answer that cannot be read is counted as a failed sample, and harms nobody.
func (m *meter) count(text string) {
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

// errRankUnknown is for an answer that another rank than the chosen one may have served: nothing is known about where its experts are.
var errRankUnknown = errors.New("the rank that served the request is not known")

var errNotTold = errors.New("the response, or what is known of its pod, does not tell")

// observe counts by the placement that the pod serves under: a pod whose plan is not at hand cannot be counted at all.
func (m *meter) observe(text string) (lar.Observation, error) {
	backend := m.lease.Backend
	if text == "" || backend.Shape == nil || m.lease.Rank == discovery.NoRank {
		return lar.Observation{}, errNotTold
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

// locality tells which experts are local to the lease's rank. The backend's shape must be known.
func (l *Lease) locality() (lar.Locality, error) {
	switch {
	case l.Backend.PlanDigest == "":
		return lar.Contiguous(*l.Backend.Shape, l.Backend.Ranks, l.Rank)
	case l.layout == nil:
		return lar.Locality{}, errNotTold
	}
	local, err := l.layout.Locality(*l.Backend.Shape, l.Backend.Ranks, l.Rank)
	// The engine has its rule whatever rule the plan was solved for.
	if own := l.Backend.Adapter(nil); own != nil {
		local.CopyRule = own.CopyRule
	}
	return local, err
}
