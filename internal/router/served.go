package router

import (
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/semmoe/operator/internal/lar"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/wire"
)

// follow counts how a pod that has answered serves an inference request: at once where it refuses it, else at the end of the
// body. It returns what has to be ended where nobody closes the body; nil where nothing has. An answer that breaks off is the pod's
// failure, unless the client may have gone.
func (s *sender) follow(gone func() bool, response *http.Response, r *request, lease *Lease, sent time.Time) *servedBody {
	serves := response.StatusCode < http.StatusInternalServerError
	if r.inference {
		lease.judge(serves)
	}
	switch {
	case !r.inference:
		return nil
	case !serves:
		s.failed(r, lease)
		return nil
	case response.StatusCode != http.StatusOK: // it takes no time to refuse a request
		s.observations.served(lease.Backend.Revision, lar.Service{Requests: 1})
		return nil
	}
	body := &servedBody{
		ReadCloser: response.Body, observations: s.observations, lease: lease, gone: gone, sent: sent, streamed: wire.IsStream(response),
		prompt: r.promptEstimate(), inFlight: lease.inFlight, generated: r.output,
	}
	if !body.streamed {
		body.usage = wire.NewIntegerReader(wire.GeneratedTokensMember(r.path))
	}
	if name := lease.Backend.Adapter(s.engine).RankRoutes.Reported; name != "" && lease.Backend.PinsByHeader(lease.Rank) {
		body.ranks = wire.NewIntegerReader(name)
		body.reported = func(rank int) {
			if rank != lease.Rank && lease.contradict() {
				s.metrics.otherRanks.WithLabelValues(lease.route).Inc()
			}
		}
	}
	response.Body = body
	return body
}

// failed counts an inference request that a pod has failed to serve, and so does not cache: once for a revision, however often the request
// is sent to its pods, since revisions are judged by the share of requests that they fail.
func (s *sender) failed(r *request, lease *Lease) {
	lease.Unserved()
	revision := lease.Backend.Revision
	if !r.inference || slices.Contains(r.failedBy, revision) {
		return
	}
	r.failedBy = append(r.failedBy, revision)
	s.observations.served(revision, lar.Service{Requests: 1, Failures: 1})
}

// served counts a request to a revision that has ended.
func (o *Observations) served(revision string, ended lar.Service) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.service.Add(o.now(), revision, ended)
}

// servedBody is the body of an answer as the pod sends it, whose time is taken on its way.
type servedBody struct {
	io.ReadCloser
	observations *Observations
	lease        *Lease
	gone         func() bool
	sent         time.Time
	streamed     bool
	events       wire.Events
	// ranks finds the ranks that the answer reports, for which reported is called; nil where none are expected.
	ranks    *wire.IntegerReader
	reported func(rank int)
	// prompt is the estimated length of the prompt, inFlight how many other requests the pod had when this one was
	// sent.
	prompt   int64
	inFlight int
	// usage finds the number of generated tokens in an answer in one piece; nil for a stream. generated is that number,
	// and until it has come what the request may generate.
	usage     *wire.IntegerReader
	generated int64
	// first and last are when the first and the last event of a stream had come.
	first, last time.Time
	ended       bool
}

func (b *servedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if b.ranks != nil {
		b.ranks.Add(p[:n], b.reported)
	}
	if b.usage != nil {
		b.usage.Add(p[:n], func(tokens int) { b.generated = int64(tokens) })
	}
	if b.streamed && b.events.Add(p[:n]) {
		b.last = b.observations.now()
		if b.first.IsZero() {
			b.first = b.last
			b.lease.Answered()
		}
	}
	if err != nil {
		b.end(err)
	}
	return n, err
}

func (b *servedBody) Close() error {
	b.end(nil)
	return b.ReadCloser.Close()
}

// end counts the request once. The error is what has ended the body; nil where its reader has left it. The times of a request that was sent
// to a rank, and may have been served by another, do not count: they say nothing of a plan.
func (b *servedBody) end(err error) {
	if b.ended {
		return
	}
	b.ended = true
	one := lar.Service{Requests: 1}
	if b.streamed {
		b.generated = int64(b.events.N) // one token each, unless the engine is asked for fewer events
	}
	covariates := lar.Covariates{float64(b.prompt), float64(b.generated), float64(b.inFlight)}
	switch {
	case err == io.EOF && !b.streamed:
		one.Answer.AddWith(b.observations.now().Sub(b.sent).Seconds(), covariates)
	case err != nil && err != io.EOF && !b.gone():
		one.Failures = 1
	}
	if b.events.N > 0 {
		one.FirstToken.AddWith(b.first.Sub(b.sent).Seconds(), covariates)
	}
	if b.events.N > 1 {
		one.InterToken.AddWith(b.last.Sub(b.first).Seconds()/float64(b.events.N-1), covariates)
	}
	if b.lease.Backend.Ranks > 0 && b.lease.knownRank() == discovery.NoRank {
		one = lar.Service{Requests: one.Requests, Failures: one.Failures}
	}
	b.observations.served(b.lease.Backend.Revision, one)
}
