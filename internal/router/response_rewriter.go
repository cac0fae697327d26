// SPDX-License-Identifier: Apache-2.0

package router

import (
	"encoding/json"
	"errors"
	"net/http"
	"slices"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/expertload"
	"github.com/semmoe/operator/internal/router/jsonscan"
	"github.com/semmoe/operator/internal/router/wire"
)

// responseRewriter is the stage that edits the routed experts in a response.
type responseRewriter struct {
	engine       *engine.Adapter // of pods that do not name their engine
	observations *Observations
}

// rewrite processes the routed experts in a response. Experts that the router requested are removed and counted.
// Experts that the client requested are converted to logical ids.
func (w *responseRewriter) rewrite(response *http.Response, r *request, lease *Lease, capture capture) error {
	switch {
	case capture.strips && response.StatusCode == http.StatusOK:
		return (&responseCapture{engine: lease.Backend.Adapter(w.engine).RoutedExperts, observations: w.observations, lease: lease, request: r, sampled: capture.sampled, ids: capture.idsField != ""}).wrap(response)
	case r.asksExperts && lease.Backend.Permuted:
		return (&translator{engine: lease.Backend.Adapter(w.engine).RoutedExperts, lease: lease}).wrap(response)
	}
	return nil
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
	// ids is true if the response contains the ids of the tokens because the router requested them.
	ids bool

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
	if m.ids {
		m.tokens.PromptIDs, data = m.takeIDs(data, m.engine.TokenIDs.PromptPaths)
		m.tokens.Output, data = m.takeIDs(data, m.engine.TokenIDs.AnswerPaths)
	}
	return found, data
}

// takeIDs removes token ids from JSON data, and returns those of the only answer.
func (m *responseCapture) takeIDs(data []byte, paths [][]string) (ids []int32, rest []byte) {
	cut := wire.CutMembers
	if m.engine.TokenIDs.Null {
		cut = wire.NullMembers
	}
	var found []json.RawMessage
	for _, path := range paths {
		var values []json.RawMessage
		values, data = cut(data, path)
		found = append(found, values...)
	}
	found = slices.DeleteFunc(found, func(v json.RawMessage) bool { return string(v) == "null" })
	if len(found) != 1 || json.Unmarshal(found[0], &ids) != nil {
		return nil, data // the experts are those of the first answer, and the count of tokens is that of all
	}
	return ids, data
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
	m.request.record.Observe(observation.Local, observation.Total)
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
	count, err := lar.CountActivations(experts, shape, local, perExpert)
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
