package router

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"strconv"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/engine"
)

// Headers of a response that say who served it.
const (
	HeaderPod  = "X-Semmoe-Pod"
	HeaderRank = "X-Semmoe-Rank"
	// HeaderPlan is the short digest of the plan by whose forecast the rank was chosen; absent where it was chosen by load.
	HeaderPlan = "X-Semmoe-Plan"
)

// ProxyOptions are the settings of a proxy.
type ProxyOptions struct {
	// RankHeader pins a request to a rank of the engine; empty where that takes none: then a pod is chosen by load alone.
	RankHeader string
	// MaxBodyBytes bounds a request's body, which is kept in memory until a response begins, for the case that it has to
	// be sent again.
	MaxBodyBytes int64
	// RoutedExperts is how the engine tells the experts of a request, and SamplePercent of how many requests they are
	// asked.
	RoutedExperts engine.RoutedExperts
	SamplePercent int
	// LiveSamples is what is kept of the tokens of those requests; empty is LiveNone.
	LiveSamples LiveSamples
	// EndpointWait is how long a request may wait for a pod where none is ready.
	EndpointWait time.Duration
}

// routes are the routes that are proxied, by method.
var routes = map[string][]string{
	http.MethodGet:  {"/v1/models", "/v1/models/{model...}"},
	http.MethodPost: {"/v1/completions", "/v1/chat/completions", "/generate", "/v1/tokenize", "/tokenize", "/v1/detokenize", "/detokenize"},
}

// inference are the routes whose tokens activate experts.
var inference = map[string]bool{"/v1/completions": true, "/v1/chat/completions": true, "/generate": true}

// NewProxy returns the handler of the proxied routes, and what it observes.
func NewProxy(pool *Pool, registry prometheus.Registerer, log logr.Logger, options ProxyOptions) (http.Handler, *Observations) {
	sender := &sender{
		pool:         pool,
		options:      options,
		metrics:      newMetrics(registry, pool),
		observations: newObservations(registry, options),
		// One connection pool for all engines. No timeout on the response header: a long prompt on a loaded engine takes
		// as long as it takes, and the client decides how long it waits.
		transport: &http.Transport{
			DialContext:         (&net.Dialer{Timeout: 2 * time.Second, KeepAlive: 15 * time.Second}).DialContext,
			MaxIdleConnsPerHost: 256,
			IdleConnTimeout:     30 * time.Second,
			DisableCompression:  true,
		},
	}
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme = "http"
			r.Out.URL.Host = "engine" // replaced for each attempt
			r.Out.Header.Del(options.RankHeader)
			r.SetXForwarded()
		},
		Transport:     sender,
		FlushInterval: -1, // each event of a stream at once
		// A stream that breaks is the client's to see; here it is worth a line for who looks closely.
		ErrorLog:     slog.NewLogLogger(logr.ToSlogHandler(log), slog.LevelDebug),
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) { writeFailure(w, r, err, log) },
	}
	mux := http.NewServeMux()
	for method, paths := range routes {
		for _, path := range paths {
			mux.Handle(method+" "+path, proxy)
		}
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		writeError(w, http.StatusNotFound, "not_found", fmt.Sprintf("%s %s is not a route of this service", r.Method, r.URL.Path))
	})
	return sender.metrics.count(identified(mux)), sender.observations
}

// identified gives each request an id, for the logs of the engine and the choice of the sample.
func identified(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id := r.Header.Get(HeaderRequestID)
		if id == "" {
			id = rand.Text()
			r.Header.Set(HeaderRequestID, id)
		}
		w.Header().Set(HeaderRequestID, id)
		next.ServeHTTP(w, r)
	})
}

// count counts responses by status code.
func (m *metrics) count(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		recorder := &statusRecorder{ResponseWriter: w, code: http.StatusOK}
		defer func() { m.requests.WithLabelValues(strconv.Itoa(recorder.code)).Inc() }()
		next.ServeHTTP(recorder, r)
	})
}

type statusRecorder struct {
	http.ResponseWriter
	code int
}

func (r *statusRecorder) WriteHeader(code int) {
	r.code = code
	r.ResponseWriter.WriteHeader(code)
}

// Unwrap lets http.ResponseController reach Flush.
func (r *statusRecorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }

var (
	errNoBackend  = errors.New("no serving pod is ready")
	errNoTeller   = errors.New("no serving pod is ready whose routed experts can be told by their logical ids")
	errBodyTooBig = errors.New("request body too large")
)

// sender is the RoundTripper that finds a rank for each request, and another where the first cannot be reached.
type sender struct {
	pool         *Pool
	transport    *http.Transport
	options      ProxyOptions
	metrics      *metrics
	observations *Observations
}

func (s *sender) RoundTrip(in *http.Request) (*http.Response, error) {
	start := time.Now()
	body, err := readBody(in, s.options.MaxBodyBytes)
	if err != nil {
		return nil, err
	}
	request := newRequest(in.URL.Path, in.Header.Get(HeaderRequestID), body)
	request.asksExperts = request.inference && asks(body, s.options.RoutedExperts.RequestField)
	waiting, cancel := context.WithTimeout(in.Context(), s.options.EndpointWait)
	defer cancel()
	tried := map[string]bool{}
	for {
		lease, ok := s.acquire(waiting, request, tried)
		switch {
		case !ok && request.asksExperts:
			return nil, errNoTeller
		case !ok:
			return nil, errNoBackend
		}
		asked, look := s.look(request, body, lease)
		sent := s.observations.now()
		response, err := s.attempt(in, asked, lease)
		if err == nil && response.StatusCode != http.StatusServiceUnavailable {
			s.metrics.firstByte.Observe(time.Since(start).Seconds())
			s.account(request, lease)
			s.survey(response, request, lease, look, sent)
			if err := s.rewrite(response, request, lease, look); err != nil {
				response.Body.Close()
				return nil, fmt.Errorf("read the engine's response: %w", err)
			}
			return response, nil
		}
		if in.Context().Err() != nil {
			if response != nil {
				response.Body.Close()
			}
			return nil, in.Context().Err()
		}
		// Nothing has reached the client yet: the next pod may answer. A pod that says 503 is loading or draining.
		tried[lease.endpoint()] = true
		if err != nil {
			lease.Eject()
			s.metrics.retries.WithLabelValues("unreachable").Inc()
			continue
		}
		response.Body.Close()
		s.metrics.retries.WithLabelValues("unavailable").Inc()
	}
}

// rewrite does with the routed experts of a response what their reader needs: what the router has asked for is taken out
// and counted, what the client has asked for is told by logical ids.
func (s *sender) rewrite(response *http.Response, r *request, lease *Lease, look look) error {
	switch {
	case look.strips && response.StatusCode == http.StatusOK:
		return (&meter{engine: s.options.RoutedExperts, observations: s.observations, lease: lease, request: r, sampled: look.sampled}).wrap(response)
	case r.asksExperts && lease.Backend.Permuted:
		return (&translator{engine: s.options.RoutedExperts, lease: lease}).wrap(response)
	}
	return nil
}

// account counts a request that an engine answers.
func (s *sender) account(r *request, lease *Lease) {
	if !r.inference {
		return
	}
	s.metrics.tokens.WithLabelValues(rankLabel(lease.Rank)).Add(float64(lease.tokens))
	s.observations.window.add(arrival{rank: lease.Rank, ranks: lease.Backend.Ranks, tokens: lease.tokens})
	if lease.unscored != "" {
		s.metrics.unscored.WithLabelValues(lease.unscored).Inc()
	}
}

// acquire takes a rank of a pod that was not tried, or, once all were, waits a moment and tries all of them again: what
// was unreachable may be a pod that has just gone, whose successor comes up at this moment.
func (s *sender) acquire(ctx context.Context, r *request, tried map[string]bool) (*Lease, bool) {
	if lease, ok := s.pool.acquire(r, tried); ok {
		return lease, true
	}
	if len(tried) == 0 {
		return s.pool.wait(ctx, r, tried)
	}
	pause, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	if lease, ok := s.pool.wait(pause, r, tried); ok {
		return lease, true
	}
	clear(tried)
	return s.pool.wait(ctx, r, tried)
}

func (s *sender) attempt(in *http.Request, body []byte, lease *Lease) (*http.Response, error) {
	out := in.Clone(in.Context())
	out.URL.Host = lease.endpoint()
	out.Header.Del("Accept-Encoding") // a compressed response could not be looked into, and the way is short
	out.Host = out.URL.Host
	if lease.Backend.pinsByHeader(lease.Rank) {
		out.Header.Set(s.options.RankHeader, strconv.Itoa(lease.Rank))
	}
	out.Body, out.ContentLength = http.NoBody, int64(len(body))
	if len(body) > 0 {
		out.Body = io.NopCloser(bytes.NewReader(body))
	}
	response, err := s.transport.RoundTrip(out)
	if err != nil {
		lease.Release()
		return nil, err
	}
	response.Header.Set(HeaderPod, lease.Backend.Pod)
	response.Header.Set(HeaderRank, rankLabel(lease.Rank))
	response.Header.Del(HeaderPlan)
	if lease.scored {
		response.Header.Set(HeaderPlan, lease.layout.digest[:shortDigest])
	}
	response.Body = &leasedBody{ReadCloser: response.Body, lease: lease}
	return response, nil
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

func readBody(r *http.Request, limit int64) ([]byte, error) {
	if r.Body == nil || r.Body == http.NoBody {
		return nil, nil
	}
	defer r.Body.Close()
	body, err := io.ReadAll(io.LimitReader(r.Body, limit+1))
	if err != nil {
		return nil, fmt.Errorf("read the request's body: %w", err)
	}
	if int64(len(body)) > limit {
		return nil, fmt.Errorf("%w: at most %d bytes are accepted", errBodyTooBig, limit)
	}
	return body, nil
}

// writeFailure answers a request for which no engine did.
func writeFailure(w http.ResponseWriter, r *http.Request, err error, log logr.Logger) {
	switch {
	case r.Context().Err() != nil:
		// The client has gone; 499 is what proxies log for that. Nobody reads it.
		w.WriteHeader(499)
	case errors.Is(err, errBodyTooBig):
		writeError(w, http.StatusRequestEntityTooLarge, "invalid_request_error", err.Error())
	case errors.Is(err, errNoBackend), errors.Is(err, errNoTeller):
		w.Header().Set("Retry-After", "5")
		writeError(w, http.StatusServiceUnavailable, "service_unavailable", err.Error()+": try again later")
	default:
		log.Error(err, "Failing a request")
		writeError(w, http.StatusBadGateway, "bad_gateway", "the request could not be passed on to a serving pod")
	}
}

// writeError writes an error in OpenAI's shape.
func writeError(w http.ResponseWriter, code int, kind, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(map[string]any{"error": map[string]any{"message": message, "type": kind, "code": code}})
}
