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

// Response headers that identify the pod, the rank and the plan that served the request.
const (
	HeaderPod = "X-Semmoe-Pod"
	// HeaderRank is the rank that served the request. It is absent if the rank is not known.
	HeaderRank = "X-Semmoe-Rank"
	// HeaderPlan is the short digest of the plan that scored the rank. It is absent if the rank was chosen by
	// load.
	HeaderPlan = "X-Semmoe-Plan"
)

// ProxyOptions configures a proxy. The engine settings (RankHeader, RankRoutes, RoutingKeyHeader, RoutedExperts,
// TokenizePath) apply to pods that do not name their engine.
type ProxyOptions struct {
	// RankHeader pins a request to a rank of a pod. If it is empty, the engine accepts no rank and the pod is chosen by
	// load only.
	RankHeader string
	// RankRoutes lists the routes on which the engine ignores the header.
	RankRoutes engine.RankRoutes
	// RoutingKeyHeader groups the waiting requests that the engine should batch. It is empty if the engine takes no
	// such hint.
	RoutingKeyHeader string
	// MaxBodyBytes is the maximum size of a request body. The body stays in memory until a response begins, because the
	// request may have to be sent again.
	MaxBodyBytes int64
	// Memory bounds the memory of all requests, including their headers; nil selects client.NewMemory.
	Memory *httpserver.Memory
	// RoutedExperts describes how the engine reports the routed experts of a request. SamplePercent is the percentage
	// of requests that the router samples for them.
	RoutedExperts engine.RoutedExperts
	SamplePercent int
	// ExpertLoadSeries is the number of experts with the highest load, and of those with the lowest, that get their own
	// series.
	ExpertLoadSeries int
	// LiveSamples selects which tokens of the sampled requests are kept; empty means livesamples.None.
	LiveSamples livesamples.Kind
	// TokenizePath is the engine route that returns the token ids of a prompt; empty if there is none.
	TokenizePath string
	// EndpointWait is the maximum time that a request waits for a ready pod.
	EndpointWait time.Duration
	// ClientTimeout is the maximum time that a client may take to send a body, and the maximum time that it may read
	// nothing of a pending response. 0 means no limit.
	ClientTimeout time.Duration
}

// requestFields and startFields are the body fields of all supported engines. Every field is checked on every request:
// pods of several engines may serve together, and a client does not know which engine answers.
var (
	requestFields = registry.Names(func(a engine.Adapter) string { return a.RoutedExperts.RequestField })
	startFields   = registry.Names(func(a engine.Adapter) string { return a.RoutedExperts.StartField })
)

// rankHeaders lists the request headers that choose a rank.
func rankHeaders(header http.Header) []string {
	var names []string
	for name := range header {
		if engine.NamesRank(name) {
			names = append(names, name)
		}
	}
	return names
}

// adapter returns the engine adapter for pods that do not name their engine.
func (o *ProxyOptions) adapter() *engine.Adapter {
	return &engine.Adapter{
		RankHeader: o.RankHeader, RankRoutes: o.RankRoutes, RoutingKeyHeader: o.RoutingKeyHeader, RoutedExperts: o.RoutedExperts,
		Generation: engine.Generation{TokenizePath: o.TokenizePath},
	}
}

// NewProxy returns the handler of the proxied routes and the observations that it records.
func NewProxy(pool *Pool, registry prometheus.Registerer, log logr.Logger, options ProxyOptions) (http.Handler, *Observations) {
	sender := newSender(pool, registry, options)
	return newProxyHandler(sender, log), sender.observations
}

// newProxyHandler returns the handler that forwards requests through a sender.
func newProxyHandler(sender *sender, log logr.Logger) http.Handler {
	options := sender.options
	fail := func(w http.ResponseWriter, r *http.Request, err error) { writeFailure(w, r, err, log) }
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme = "http"
			r.Out.URL.Host = "engine"  // replaced for each attempt
			r.Out.Header.Del("Expect") // the body was read before, so the client has already got 100 Continue
			// No route can be upgraded. A client may offer HTTP/2 with every request, and some engines then read no
			// body.
			for _, name := range append([]string{"Connection", "Upgrade", "Http2-Settings"}, rankHeaders(r.Out.Header)...) {
				r.Out.Header.Del(name)
			}
			r.SetXForwarded()
		},
		// ReverseProxy flushes streams and responses of unknown length after each event, regardless of FlushInterval.
		Transport:  sender,
		BufferPool: &client.CopyBuffers{},
		// A broken stream is visible to the client. Here it is logged at debug level only.
		ErrorLog:     slog.NewLogLogger(logr.ToSlogHandler(log), slog.LevelDebug),
		ErrorHandler: fail,
	}
	limits := client.Limits{MaxBodyBytes: options.MaxBodyBytes, Timeout: options.ClientTimeout, Memory: options.Memory}
	if limits.Memory == nil {
		limits.Memory = client.NewMemory(options.MaxBodyBytes)
	}
	handler := routes.Only(client.WithBody(proxy, limits, fail))
	return sender.metrics.count(identified(handler), options.ClientTimeout)
}

// newTransport returns one connection pool for all engines. It sets no timeout for the response header: a long prompt
// on a loaded engine may take any time, and the client decides how long it waits.
func newTransport() *http.Transport {
	return &http.Transport{
		DialContext:         (&net.Dialer{Timeout: 2 * time.Second, KeepAlive: 15 * time.Second}).DialContext,
		MaxIdleConnsPerHost: 256,
		// Engine servers close a connection after 5 s without requests. A request that is sent at that moment is lost.
		IdleConnTimeout:    4 * time.Second,
		DisableCompression: true,
		// The default is 10 MiB per response.
		MaxResponseHeaderBytes: 256 << 10,
	}
}

// identified gives each request an id, which the engine logs.
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

// count counts responses by status code. The timeout bounds how long a client may read nothing of a response.
func (m *metrics) count(next http.Handler, timeout time.Duration) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		writer := client.NewWriter(w, timeout)
		defer func() { m.requests.WithLabelValues(strconv.Itoa(writer.Code())).Inc() }()
		next.ServeHTTP(writer, r)
	})
}

var (
	errNoBackend       = errors.New("no serving pod is ready")
	errNoRoutedExperts = errors.New("no ready pod can return routed experts with logical expert IDs")
	errUnanswered      = errors.New("the request was sent to serving pods, and none of them answered")
	errRankChosen      = errors.New("the request body is invalid: it must be JSON, and must not choose a data-parallel rank")
	errCompressed      = errors.New("the request body is invalid: it must not be compressed")
	errQueueFull       = errors.New("the request queues of the serving pods are full")
)

// attemptsOnceSent is the maximum number of pods that receive a request if each of them breaks the connection. The
// request itself may crash the pods, and must not crash all of them.
const attemptsOnceSent = 3

const (
	// firstPause is the time until a request is sent to all pods again. It doubles each time, up to longestPause.
	firstPause   = 100 * time.Millisecond
	longestPause = time.Second
)

// sender is the RoundTripper that selects a rank for each request, and another rank if the first one is unreachable.
type sender struct {
	pool         *Pool
	transport    http.RoundTripper
	options      ProxyOptions
	engine       *engine.Adapter // of pods that do not name their engine
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

// tokenizerUnder returns the tokenize URL of a pod that serves under a plan. ok is false if no such pod has the route.
func (s *sender) tokenizerUnder(plan string) (url string, ok bool) {
	backend, ok := s.pool.backendUnder(plan)
	path := backend.Adapter(s.engine).Generation.TokenizePath
	return "http://" + backend.Address + path, ok && path != ""
}

// checkRank rejects bodies that could choose a rank in a form that wire.DropRank does not recognize. An engine may
// parse bodies that the router cannot.
func checkRank(header http.Header, body []byte) error {
	switch {
	case len(body) > 0 && wire.Compressed(header):
		return errCompressed
	case !wire.IsJSON(body) && wire.MayChooseRank(body):
		return errRankChosen
	}
	return nil
}

// read parses a client request. The context is the context of the request.
func (s *sender) read(ctx context.Context, path, id string, body []byte) *request {
	r := newRequest(path, id, body)
	r.tokenize = s.tokenizer.For(ctx)
	r.lacking = lacking[path]
	r.shifted = r.reportsExperts && wire.RequestsAny(body, startFields)
	r.sampled = r.reportsExperts && !r.shifted && sampled(rand.Uint64(), s.options.SamplePercent)
	r.asksExperts = r.reportsExperts && wire.RequestsAny(body, requestFields)
	r.writable = wire.IsObject(body)
	route, infers := inference[path]
	neverPinned := infers && route.smallest == ""
	r.pins = func(b discovery.Backend) bool {
		routes := b.Adapter(s.engine).RankRoutes
		return !neverPinned && !slices.Contains(routes.Unpinned, path) && (r.writable || routes.FieldOn(path) == "")
	}
	return r
}

// RoundTrip tries pods until a response begins. It sends a request again even if a pod may have processed it:
// generation has no side effects, so only the compute time is lost.
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
			return nil, errNoRoutedExperts
		case !ok:
			return nil, errNoBackend
		}
		response, capture, began, err := s.attempt(in, body.Bytes(), request, lease)
		if err == nil && response.StatusCode != http.StatusServiceUnavailable {
			body.Drop() // no further attempt follows, and the response may take minutes
			explainNotFound(response, request.path)
			capture = s.limitCapture(response, lease, capture)
			request.answered(capture)
			s.metrics.firstByte.Observe(time.Since(start).Seconds())
			s.recordLoad(request, lease)
			s.trackResponse(func() bool { return in.Context().Err() != nil }, response, request, lease, began)
			s.countEligible(response, request, lease, capture, began)
			if err := s.rewrite(response, request, lease, capture); err != nil {
				response.Body.Close()
				return nil, fmt.Errorf("read the engine's response: %w", err)
			}
			lease.markRank(response.Header) // a buffered response may report another rank
			return response, nil
		}
		full := false
		if response != nil {
			full = wire.IsQueueFull(response.Body)
			response.Body.Close()
		}
		if in.Context().Err() != nil {
			return nil, in.Context().Err()
		}
		s.failed(request, lease)
		tries.add(lease, full)
		if err == nil { // 503: the pod is loading, draining or overloaded
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

// isDial reports whether the connection failed, so that the request was not sent.
func isDial(err error) bool {
	var operation *net.OpError
	return errors.As(err, &operation) && operation.Op == "dial"
}

// rewrite processes the routed experts in a response. Experts that the router requested are removed and counted.
// Experts that the client requested are converted to logical ids.
func (s *sender) rewrite(response *http.Response, r *request, lease *Lease, capture capture) error {
	switch {
	case capture.strips && response.StatusCode == http.StatusOK:
		return (&responseCapture{engine: lease.Backend.Adapter(s.engine).RoutedExperts, observations: s.observations, lease: lease, request: r, sampled: capture.sampled}).wrap(response)
	case r.asksExperts && lease.Backend.Permuted:
		return (&translator{engine: lease.Backend.Adapter(s.engine).RoutedExperts, lease: lease}).wrap(response)
	}
	return nil
}

// recordLoad records the load of a request that an engine answers.
func (s *sender) recordLoad(r *request, lease *Lease) {
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

// tries records the failed attempts of the current round. In a round each pod gets the request once. A pod with
// separate queues per rank gets it a second time if the queue of the first rank is full.
type tries struct {
	places map[string]bool
	// full contains the endpoints that serve requests but have a full queue.
	full map[string]bool
	// pause is the time to wait before the next round.
	pause time.Duration
}

// add records that the place of a lease did not answer. full is true if its queue is full.
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

// acquire reserves a rank of a pod that was not tried. Once all pods were tried, it waits and tries all of them again:
// an unreachable pod may have just been deleted, and its successor may be starting. It fails at the deadline. It fails
// at once if pods have full queues, because polling them would add to their load.
func (s *sender) acquire(ctx context.Context, deadline time.Time, r *request, tries *tries) (*Lease, bool) {
	r.mayWait = len(tries.places) == 0
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

// attempt sends a request to the place of its lease. It returns the capture state and the time of sending. A request
// that may have been rejected because of the capture is sent once more with the client's body, and counts as if it had
// been sent unchanged.
func (s *sender) attempt(in *http.Request, body []byte, r *request, lease *Lease) (_ *http.Response, _ capture, sent time.Time, _ error) {
	asked, done := s.requestExperts(r, body, lease)
	sent = s.observations.now()
	response, err := s.send(in, asked, r, lease)
	if err == nil && done.refused(response) {
		response.Body.Close()
		lease.releaseReserved()
		done, sent = capture{}, s.observations.now()
		response, err = s.send(in, body, r, lease)
	}
	if err != nil {
		lease.Release()
		return nil, capture{}, sent, err
	}
	lease.mark(response.Header)
	response.Body = &leasedBody{ReadCloser: response.Body, lease: lease}
	return response, done, sent, nil
}

// send sends a request with a body to the place of its lease.
func (s *sender) send(in *http.Request, body []byte, r *request, lease *Lease) (*http.Response, error) {
	out := in.Clone(in.Context())
	out.URL.Host = lease.endpoint()
	out.Header.Del("Accept-Encoding") // the router cannot read a compressed response, and the network path is short
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
		defer kept.Drop() // the response references its request
		// The server may have closed a reused connection before anything was sent. The transport then uses another
		// connection.
		out.GetBody = func() (io.ReadCloser, error) { return prefixed(head, kept.Reader()), nil }
		out.Body = prefixed(head, kept.Reader())
	}
	return s.transport.RoundTrip(out)
}

// withRank returns the body of a request to the rank of a lease in two parts. The first part contains the rank if the
// engine reads it from the body. On the responses route, the first part disables storage of the response.
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

// prefixed returns a reader of head followed by body.
func prefixed(head string, body io.ReadCloser) io.ReadCloser {
	if head == "" {
		return body
	}
	return struct {
		io.Reader
		io.Closer
	}{io.MultiReader(strings.NewReader(head), body), body}
}

// routingKey returns the header that names the rank with most of the request's experts. Load may have moved the request
// to another rank. The engine batches waiting requests with the same key. A key that the client has set is kept: it
// chooses no rank, and the client knows more about its requests than a forecast.
func (s *sender) routingKey(header http.Header, r *request, lease *Lease) (name, key string) {
	name = lease.Backend.Adapter(s.engine).RoutingKeyHeader
	if name == "" || !lease.scored || header.Get(name) != "" {
		return "", ""
	}
	return name, strconv.Itoa(r.forecast.best)
}

// mark sets the response headers that identify the pod, the rank and the plan.
func (l *Lease) mark(header http.Header) {
	header.Set(HeaderPod, l.Backend.Pod)
	l.markRank(header)
	header.Del(HeaderRequestID) // the client gets the id from the router, whether or not the engine repeats it
	header.Del(HeaderPlan)
	if l.scored {
		header.Set(HeaderPlan, artifact.Digest(l.layout.Tables).Short())
	}
}

// markRank sets the header with the rank that served the request. It removes the header if the rank is not known.
func (l *Lease) markRank(header http.Header) {
	header.Del(HeaderRank)
	if rank := l.knownRank(); rank != discovery.NoRank {
		header.Set(HeaderRank, strconv.Itoa(rank))
	}
}

// leasedBody releases the place on the rank when the response has been read or the client has disconnected.
type leasedBody struct {
	io.ReadCloser
	lease *Lease
	once  sync.Once
}

func (b *leasedBody) Close() error {
	b.once.Do(b.lease.Release)
	return b.ReadCloser.Close()
}

// writeFailure answers a request that no engine has answered.
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
		// The client has disconnected and reads no response. Proxies log this as 499.
		w.WriteHeader(499)
	case errors.Is(err, client.ErrBodyBroken):
		fail(http.StatusBadRequest, wire.InvalidRequest, err.Error())
	case errors.Is(err, errNoBackend), errors.Is(err, errNoRoutedExperts):
		w.Header().Set("Retry-After", "5")
		fail(http.StatusServiceUnavailable, wire.Unavailable, err.Error()+"; retry later")
	case errors.Is(err, errAllFull), errors.Is(err, errQueueFull), errors.Is(err, client.ErrNoMemory):
		w.Header().Set("Retry-After", "1")
		fail(http.StatusTooManyRequests, wire.RateLimited, err.Error()+"; retry later")
	default:
		log.Error(err, "Request failed")
		fail(http.StatusBadGateway, wire.BadGateway, "the request could not be forwarded to a serving pod")
	}
}
