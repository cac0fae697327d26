package router

import (
	"context"
	cryptorand "crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httputil"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/httpserver"
	"github.com/semmoe/operator/internal/router/balance"
	"github.com/semmoe/operator/internal/router/client"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/livesamples"
	"github.com/semmoe/operator/internal/router/tokenize"
	"github.com/semmoe/operator/internal/router/wire"
)

// Headers of a response that say who served it.
const (
	HeaderPod = "X-Semmoe-Pod"
	// HeaderRank is the rank that served. It is absent where the rank is not known.
	HeaderRank = "X-Semmoe-Rank"
	// HeaderPlan is the short digest of the plan by whose tables the rank was chosen; absent where it was chosen by load.
	HeaderPlan = "X-Semmoe-Plan"
)

// ProxyOptions are the settings of a proxy.
type ProxyOptions struct {
	// RankHeader pins a request to a rank of a pod that does not tell its engine, as all that is said of engines here is of such pods; empty
	// where that takes none: then the pod is chosen by load alone.
	RankHeader string
	// RankRoutes are the routes on which that engine ignores the header.
	RankRoutes engine.RankRoutes
	// RoutingKeyHeader tells the engine which waiting requests to batch; empty where it takes no such hint.
	RoutingKeyHeader string
	// MaxBodyBytes bounds a request's body, which is kept in memory until a response begins, for the case that it has to
	// be sent again.
	MaxBodyBytes int64
	// Memory bounds what all requests hold, their headers included; nil for client.NewMemory.
	Memory *httpserver.Memory
	// RoutedExperts is how the engine tells the experts of a request, and SamplePercent of how many requests they are
	// asked.
	RoutedExperts engine.RoutedExperts
	SamplePercent int
	// ExpertLoadSeries is how many experts with the highest load, and how many with the lowest, have series of their own.
	ExpertLoadSeries int
	// LiveSamples is what is kept of the tokens of those requests; empty is livesamples.None.
	LiveSamples livesamples.Kind
	// TokenizePath is the engine's route that tells the token ids of a prompt; empty where it has none.
	TokenizePath string
	// EndpointWait is how long a request may wait for a pod where none is ready.
	EndpointWait time.Duration
	// ClientTimeout is how long a client may take to send a body, and how long it may take nothing of an answer that waits
	// for it; 0 for ever.
	ClientTimeout time.Duration
}

// What the engines call their headers and fields, each: pods of several may serve together, and a client does not know whose it gets.
var (
	requestFields = registry.Names(func(a engine.Adapter) string { return a.RoutedExperts.RequestField })
	startFields   = registry.Names(func(a engine.Adapter) string { return a.RoutedExperts.StartField })
)

// rankHeaders lists the headers of a request that choose a rank.
func rankHeaders(header http.Header) []string {
	var names []string
	for name := range header {
		if engine.NamesRank(name) {
			names = append(names, name)
		}
	}
	return names
}

// adapter is the engine of pods that do not tell theirs.
func (o *ProxyOptions) adapter() *engine.Adapter {
	return &engine.Adapter{
		RankHeader: o.RankHeader, RankRoutes: o.RankRoutes, RoutingKeyHeader: o.RoutingKeyHeader, RoutedExperts: o.RoutedExperts,
		Generation: engine.Generation{TokenizePath: o.TokenizePath},
	}
}

// NewProxy returns the handler of the proxied routes, and what it observes.
func NewProxy(pool *Pool, registry prometheus.Registerer, log logr.Logger, options ProxyOptions) (http.Handler, *Observations) {
	sender := newSender(pool, registry, options)
	fail := func(w http.ResponseWriter, r *http.Request, err error) { writeFailure(w, r, err, log) }
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme = "http"
			r.Out.URL.Host = "engine"  // replaced for each attempt
			r.Out.Header.Del("Expect") // the body is here already: the client has been told to go on
			// No route can be upgraded. A client may offer HTTP/2 with every request, and some engines then read no body.
			for _, name := range append([]string{"Connection", "Upgrade", "Http2-Settings"}, rankHeaders(r.Out.Header)...) {
				r.Out.Header.Del(name)
			}
			r.SetXForwarded()
		},
		// Streams, and all answers of unknown length, are flushed event by event whatever FlushInterval says.
		Transport:  sender,
		BufferPool: &client.CopyBuffers{},
		// A stream that breaks is the client's to see; here it is worth a line for who looks closely.
		ErrorLog:     slog.NewLogLogger(logr.ToSlogHandler(log), slog.LevelDebug),
		ErrorHandler: fail,
	}
	limits := client.Limits{MaxBodyBytes: options.MaxBodyBytes, Timeout: options.ClientTimeout, Memory: options.Memory}
	if limits.Memory == nil {
		limits.Memory = client.NewMemory(options.MaxBodyBytes)
	}
	handler := routes.Only(client.WithBody(proxy, limits, fail))
	return sender.metrics.count(identified(handler), options.ClientTimeout), sender.observations
}

// newTransport is one connection pool for all engines. There is no timeout on the response header: a long prompt on a loaded
// engine takes as long as it takes, and the client decides how long it waits.
func newTransport() *http.Transport {
	return &http.Transport{
		DialContext:         (&net.Dialer{Timeout: 2 * time.Second, KeepAlive: 15 * time.Second}).DialContext,
		MaxIdleConnsPerHost: 256,
		// The engines' servers close a connection that was idle for 5 s: a request that is sent at that moment is lost.
		IdleConnTimeout:    4 * time.Second,
		DisableCompression: true,
		// The default is 10 MiB for each answer.
		MaxResponseHeaderBytes: 256 << 10,
	}
}

// identified gives each request an id, for the logs of the engine.
func identified(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id := r.Header.Get(HeaderRequestID)
		if id == "" {
			id = cryptorand.Text()
			r.Header.Set(HeaderRequestID, id)
		}
		w.Header().Set(HeaderRequestID, id)
		next.ServeHTTP(w, r)
	})
}

// count counts responses by status code. A client may take nothing of a response for so long.
func (m *metrics) count(next http.Handler, timeout time.Duration) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		writer := client.NewWriter(w, timeout)
		defer func() { m.requests.WithLabelValues(strconv.Itoa(writer.Code())).Inc() }()
		next.ServeHTTP(writer, r)
	})
}

var (
	errNoBackend  = errors.New("no serving pod is ready")
	errNoTeller   = errors.New("no serving pod is ready whose routed experts can be told by their logical ids")
	errUnanswered = errors.New("the request was sent to serving pods, and none of them answered")
	errRankChosen = errors.New("the request body is invalid: it must be JSON, and must not choose a data-parallel rank")
	errCompressed = errors.New("the request body is invalid: it must not be compressed")
	errQueueFull  = errors.New("the request queues of the serving pods are full")
)

// attemptsOnceSent bounds how many pods get a request of which each but the last broke the connection. It may be the
// request that breaks them, and all of them must not go down with it.
const attemptsOnceSent = 3

const (
	// firstPause is how long a request waits before it is sent to all pods again; it doubles each time, up to longestPause.
	firstPause   = 100 * time.Millisecond
	longestPause = time.Second
)

// sender is the RoundTripper that finds a rank for each request, and another where the first cannot be reached.
type sender struct {
	pool         *Pool
	transport    *http.Transport
	options      ProxyOptions
	engine       *engine.Adapter // of pods that do not tell theirs
	metrics      *metrics
	observations *Observations
	tokenizer    *tokenize.Remote
}

func newSender(pool *Pool, registry prometheus.Registerer, options ProxyOptions) *sender {
	s := &sender{
		pool:         pool,
		transport:    newTransport(),
		options:      options,
		engine:       options.adapter(),
		metrics:      newMetrics(registry, pool),
		observations: newObservations(registry, options, pool),
	}
	s.tokenizer = tokenize.New(s.tokenizerUnder, s.transport)
	return s
}

// tokenizerUnder is the URL by which a pod that serves under a plan tells the token ids of a prompt, if there is one.
func (s *sender) tokenizerUnder(plan string) (url string, ok bool) {
	backend, ok := s.pool.backendUnder(plan)
	path := backend.Adapter(s.engine).Generation.TokenizePath
	return "http://" + backend.Address + path, ok && path != ""
}

// checkRank refuses a body that could choose a rank where wire.DropRank does not see it: the engine may read what the router cannot.
func checkRank(header http.Header, body []byte) error {
	switch {
	case len(body) > 0 && wire.Compressed(header):
		return errCompressed
	case !wire.IsJSON(body) && wire.MayChooseRank(body):
		return errRankChosen
	}
	return nil
}

// read reads what a client sends. The context is the request's.
func (s *sender) read(ctx context.Context, path, id string, body []byte) *request {
	r := newRequest(path, id, body)
	r.tokenize = s.tokenizer.For(ctx)
	r.lacking = lacking[path]
	r.shifted = r.reportsExperts && wire.Asks(body, startFields)
	r.sampled = r.reportsExperts && !r.shifted && sampled(rand.Uint64(), s.options.SamplePercent)
	r.asksExperts = r.reportsExperts && wire.Asks(body, requestFields)
	r.writable = wire.IsObject(body)
	route, infers := inference[path]
	neverPinned := infers && route.smallest == ""
	r.pins = func(b discovery.Backend) bool {
		routes := b.Adapter(s.engine).RankRoutes
		return !neverPinned && !slices.Contains(routes.Unpinned, path) && (r.writable || routes.FieldOn(path) == "")
	}
	return r
}

// RoundTrip tries pods as long as nothing of a response has reached the client. That is safe for a request that a pod may
// have processed already, since to generate text changes nothing; what it has cost is lost.
func (s *sender) RoundTrip(in *http.Request) (*http.Response, error) {
	start, body := time.Now(), client.BodyOf(in)
	if err := checkRank(in.Header, body.Bytes()); err != nil {
		return nil, err
	}
	if err := checkState(in.URL.Path, body.Bytes()); err != nil {
		return nil, err
	}
	wire.DropRank(body.Bytes())
	request := s.read(in.Context(), in.URL.Path, in.Header.Get(HeaderRequestID), body.Bytes())
	deadline := start.Add(s.options.EndpointWait)
	tries := &tries{places: map[string]bool{}, full: map[string]bool{}, pause: firstPause}
	for sent := 0; ; {
		lease, ok := s.acquire(in.Context(), deadline, request, tries)
		switch {
		case !ok && request.refused != nil:
			return nil, request.refused
		case !ok && request.asksExperts:
			return nil, errNoTeller
		case !ok:
			return nil, errNoBackend
		}
		response, look, began, err := s.attempt(in, body.Bytes(), request, lease)
		if err == nil && response.StatusCode != http.StatusServiceUnavailable {
			body.Drop() // it will not be sent again, and the answer may take minutes
			clarify(response, request.path)
			look = s.measured(response, lease, look)
			request.answered(look)
			s.metrics.firstByte.Observe(time.Since(start).Seconds())
			s.account(request, lease)
			s.follow(func() bool { return in.Context().Err() != nil }, response, request, lease, began)
			s.survey(response, request, lease, look, began)
			if err := s.rewrite(response, request, lease, look); err != nil {
				response.Body.Close()
				return nil, fmt.Errorf("read the engine's response: %w", err)
			}
			lease.markRank(response.Header) // an answer that was read whole may report another rank
			return response, nil
		}
		full := false
		if response != nil {
			full = wire.SaysFull(response.Body)
			response.Body.Close()
		}
		if in.Context().Err() != nil {
			return nil, in.Context().Err()
		}
		s.failed(request, lease)
		tries.add(lease, full)
		if err == nil { // a pod that says 503 is loading or draining, or has enough to do
			s.metrics.retries.WithLabelValues(retryUnavailable).Inc()
			continue
		}
		lease.Eject()
		if !isDial(err) {
			if sent++; sent == attemptsOnceSent {
				return nil, fmt.Errorf("%w: %w", errUnanswered, err)
			}
		}
		s.metrics.retries.WithLabelValues(retryUnreachable).Inc()
	}
}

// isDial tells that no connection was made: the request did not leave.
func isDial(err error) bool {
	var operation *net.OpError
	return errors.As(err, &operation) && operation.Op == "dial"
}

// rewrite does with the routed experts of a response what their reader needs: what the router has asked for is taken out
// and counted, what the client has asked for is told by logical ids.
func (s *sender) rewrite(response *http.Response, r *request, lease *Lease, look look) error {
	switch {
	case look.strips && response.StatusCode == http.StatusOK:
		return (&meter{engine: lease.Backend.Adapter(s.engine).RoutedExperts, observations: s.observations, lease: lease, request: r, sampled: look.sampled}).wrap(response)
	case r.asksExperts && lease.Backend.Permuted:
		return (&translator{engine: lease.Backend.Adapter(s.engine).RoutedExperts, lease: lease}).wrap(response)
	}
	return nil
}

// account counts a request that an engine answers.
func (s *sender) account(r *request, lease *Lease) {
	if !r.inference {
		return
	}
	rank := lease.knownRank()
	s.metrics.tokens.WithLabelValues(rankLabel(rank)).Add(float64(lease.tokens))
	s.observations.window.Add(balance.Arrival{Rank: rank, Ranks: lease.Backend.Ranks, Tokens: lease.tokens})
	if lease.unscored != "" {
		s.metrics.unscored.WithLabelValues(lease.unscored).Inc()
	}
}

// tries are what came of sending a request to the pods of the present round, in which each gets it once; one whose ranks have queues of
// their own twice, where the first of them is full.
type tries struct {
	places map[string]bool
	// full are the endpoints that serve, and have too long a queue.
	full map[string]bool
	// pause is how long the next round is waited for.
	pause time.Duration
}

// add notes that a place does not answer, because its queue is full or otherwise.
func (t *tries) add(lease *Lease, full bool) {
	endpoint := lease.endpoint()
	place := endpoint
	if full && !t.full[endpoint] && lease.Backend.PinsByHeader(lease.Rank) {
		place = rankAt(endpoint, lease.Rank)
	}
	t.places[place] = true
	if full {
		t.full[endpoint] = true
	}
}

// acquire takes a rank of a pod that was not tried, or, once all were, waits a moment and tries all of them again: what
// was unreachable may be a pod that has just gone, whose successor comes up at this moment. It gives up at the deadline, and at
// once where pods are there whose queues are full: to ask them again and again would only add to what they have to do.
func (s *sender) acquire(ctx context.Context, deadline time.Time, r *request, tries *tries) (*Lease, bool) {
	r.patient = len(tries.places) == 0
	if lease, ok := s.pool.acquire(r, tries.places); ok {
		return lease, true
	}
	if len(tries.full) > 0 {
		r.refused = errQueueFull
	}
	if r.refused != nil {
		return nil, false
	}
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	if len(tries.places) == 0 {
		return s.pool.wait(ctx, r, nil)
	}
	pause, cancelPause := context.WithTimeout(ctx, tries.pause)
	defer cancelPause()
	if lease, ok := s.pool.wait(pause, r, tries.places); ok {
		return lease, true
	}
	if ctx.Err() != nil {
		return nil, false
	}
	clear(tries.places)
	tries.pause = min(2*tries.pause, longestPause)
	return s.pool.wait(ctx, r, nil)
}

// attempt sends a request to the place of its lease, and says what was done to know its experts, and when it was sent. What may have
// been refused for that is sent once more as the client has sent it, and counts as if it had been sent so at once.
func (s *sender) attempt(in *http.Request, body []byte, r *request, lease *Lease) (_ *http.Response, _ look, sent time.Time, _ error) {
	asked, done := s.look(r, body, lease)
	sent = s.observations.now()
	response, err := s.send(in, asked, r, lease)
	if err == nil && done.refused(response) {
		response.Body.Close()
		lease.unhold()
		done, sent = look{}, s.observations.now()
		response, err = s.send(in, body, r, lease)
	}
	if err != nil {
		lease.Release()
		return nil, look{}, sent, err
	}
	lease.mark(response.Header)
	response.Body = &leasedBody{ReadCloser: response.Body, lease: lease}
	return response, done, sent, nil
}

// send sends a request with a body to the place of its lease.
func (s *sender) send(in *http.Request, body []byte, r *request, lease *Lease) (*http.Response, error) {
	out := in.Clone(in.Context())
	out.URL.Host = lease.endpoint()
	out.Header.Del("Accept-Encoding") // a compressed response could not be looked into, and the way is short
	out.Host = out.URL.Host
	if lease.Backend.PinsByHeader(lease.Rank) {
		out.Header.Set(lease.Backend.Adapter(s.engine).RankHeader, strconv.Itoa(lease.Rank))
	}
	if name, key := s.routingKey(out.Header, r, lease); name != "" {
		out.Header.Set(name, key)
	}
	head, rest := s.withRank(in.URL.Path, body, lease)
	out.Body, out.ContentLength, out.TransferEncoding = http.NoBody, int64(len(head)+len(rest)), nil
	if len(body) > 0 {
		kept := client.NewBody(rest)
		defer kept.Drop() // the response keeps its request
		// A kept connection may turn out to be closed before anything was sent: then the transport takes another one.
		out.GetBody = func() (io.ReadCloser, error) { return prefixed(head, kept.Reader()), nil }
		out.Body = prefixed(head, kept.Reader())
	}
	return s.transport.RoundTrip(out)
}

// withRank returns the body of a request to a lease's rank in two parts. The first contains the rank where the engine reads it there, and asks
// for no stored response.
func (s *sender) withRank(path string, body []byte, lease *Lease) (head string, rest []byte) {
	if path == wire.ResponsesPath {
		return wire.WithoutStore(body)
	}
	field := lease.Backend.Adapter(s.engine).RankRoutes.FieldOn(path)
	if field == "" || !lease.Backend.PinsByHeader(lease.Rank) {
		return "", body
	}
	head, rest, _ = wire.With(body, field, strconv.Itoa(lease.Rank))
	return head, rest
}

// prefixed reads a text before a body.
func prefixed(head string, body io.ReadCloser) io.ReadCloser {
	if head == "" {
		return body
	}
	return struct {
		io.Reader
		io.Closer
	}{io.MultiReader(strings.NewReader(head), body), body}
}

// routingKey is the header that names the rank that holds most of the request's experts, which may be another than the one that load has
// left for it: requests of one kind that wait on a rank are then batched. A client's own key is left: it chooses no rank,
// and whoever sets it knows more about its requests than a forecast.
func (s *sender) routingKey(header http.Header, r *request, lease *Lease) (name, key string) {
	name = lease.Backend.Adapter(s.engine).RoutingKeyHeader
	if name == "" || !lease.scored || header.Get(name) != "" {
		return "", ""
	}
	return name, strconv.Itoa(r.forecast.best)
}

// mark says in a response's header who served it.
func (l *Lease) mark(header http.Header) {
	header.Set(HeaderPod, l.Backend.Pod)
	l.markRank(header)
	header.Del(HeaderRequestID) // the client is told it already, whether or not the engine repeats it
	header.Del(HeaderPlan)
	if l.scored {
		header.Set(HeaderPlan, artifact.Digest(l.layout.Tables).Short())
	}
}

// markRank sets the header of the rank that served, or removes it where the rank is not known.
func (l *Lease) markRank(header http.Header) {
	header.Del(HeaderRank)
	if rank := l.knownRank(); rank != discovery.NoRank {
		header.Set(HeaderRank, strconv.Itoa(rank))
	}
}

// leasedBody gives the place on the rank back when the response has been read, or its client has gone.
type leasedBody struct {
	io.ReadCloser
	lease *Lease
	once  sync.Once
}

func (b *leasedBody) Close() error {
	b.once.Do(b.lease.Release)
	return b.ReadCloser.Close()
}

// writeFailure answers a request for which no engine did.
func writeFailure(w http.ResponseWriter, r *http.Request, err error, log logr.Logger) {
	fail := func(code int, kind, message string) { wire.WriteError(w, r.URL.Path, code, kind, message) }
	switch {
	case errors.Is(err, errStored) && wire.IsStoredResponse(r.URL.Path):
		fail(http.StatusNotImplemented, wire.NotImplemented, err.Error())
	case errors.Is(err, errStored):
		fail(http.StatusBadRequest, wire.InvalidRequest, err.Error())
	case errors.Is(err, errLacksRoute):
		fail(http.StatusNotFound, wire.NotFound, lacksRoute(r.URL.Path))
	case errors.Is(err, errRankChosen):
		fail(http.StatusBadRequest, wire.InvalidRequest, err.Error())
	case errors.Is(err, errCompressed):
		fail(http.StatusUnsupportedMediaType, wire.InvalidRequest, err.Error())
	case errors.Is(err, client.ErrBodyTooBig):
		fail(http.StatusRequestEntityTooLarge, wire.InvalidRequest, err.Error())
	case errors.Is(err, client.ErrBodyTooSlow):
		fail(http.StatusRequestTimeout, wire.InvalidRequest, err.Error())
	case r.Context().Err() != nil:
		// The client has gone; 499 is what proxies log for that. Nobody reads it.
		w.WriteHeader(499)
	case errors.Is(err, client.ErrBodyBroken):
		fail(http.StatusBadRequest, wire.InvalidRequest, err.Error())
	case errors.Is(err, errNoBackend), errors.Is(err, errNoTeller):
		w.Header().Set("Retry-After", "5")
		fail(http.StatusServiceUnavailable, wire.Unavailable, err.Error()+": try again later")
	case errors.Is(err, errAllFull), errors.Is(err, errQueueFull), errors.Is(err, client.ErrNoRoom):
		w.Header().Set("Retry-After", "1")
		fail(http.StatusTooManyRequests, wire.RateLimited, err.Error()+": try again later")
	default:
		log.Error(err, "Failing a request")
		fail(http.StatusBadGateway, wire.BadGateway, "the request could not be passed on to a serving pod")
	}
}
