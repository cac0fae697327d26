// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	cryptorand "crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httputil"
	"strconv"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/httpserver"
	"github.com/semmoe/operator/internal/router/client"
	"github.com/semmoe/operator/internal/router/clientauth"
	"github.com/semmoe/operator/internal/router/livesamples"
	"github.com/semmoe/operator/internal/router/telemetry"
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
	// Engines configures the connections to engines.
	Engines EngineConnections
	// Keys authenticates clients; nil serves every client.
	Keys *clientauth.Keys
	// ClientLimits bounds the requests of each key; nil means no limit.
	ClientLimits *clientauth.Limits
	// Recorder records single requests; nil records none.
	Recorder *telemetry.Recorder
	// PassThrough lists further routes of the engines that clients may use (registry.CheckPassThrough).
	PassThrough []string
	// TokenizePath is the engine route that returns the token ids of a prompt; empty if there is none.
	TokenizePath string
	// EndpointWait is the maximum time that a request waits for a ready pod.
	EndpointWait time.Duration
	// MaxAttempts is the maximum number of pods that receive a request if each of them breaks the connection; 0 selects
	// DefaultMaxAttempts. The request itself may crash the pods, and must not crash all of them.
	MaxAttempts int
	// ClientTimeout is the maximum time that a client may take to send a body, and the maximum time that it may read
	// nothing of a pending response. 0 means no limit.
	ClientTimeout time.Duration
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
	s := newStages(pool, registry, options)
	return newProxyHandler(s, options, log), s.observations
}

// newProxyHandler returns the handler that forwards requests through the stages.
func newProxyHandler(s *stages, options ProxyOptions, log logr.Logger) http.Handler {
	var origins cors
	fail := func(w http.ResponseWriter, r *http.Request, err error) {
		origins.apply(r.Header, w.Header())
		writeFailure(w, r, err, log)
	}
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme, r.Out.URL.Host = "http", "engine" // replaced for each attempt
			r.Out.URL.RawQuery = r.In.URL.RawQuery              // ReverseProxy has removed what Go cannot parse
			r.Out.Header.Del("Expect")                          // the body was read before, so the client has already got 100 Continue
			// No route can be upgraded. A client may offer HTTP/2 with every request, and some engines then read no
			// body.
			for _, name := range []string{"Connection", "Upgrade", "Http2-Settings"} {
				r.Out.Header.Del(name)
			}
			forward(r)
		},
		// ReverseProxy flushes streams and responses of unknown length after each event, regardless of FlushInterval.
		Transport:  &forwarder{stages: s, wait: options.EndpointWait, maxAttempts: cmp.Or(options.MaxAttempts, DefaultMaxAttempts), passThrough: options.PassThrough, cors: &origins},
		BufferPool: &client.CopyBuffers{},
		// A broken stream is visible to the client. Here it is logged at debug level only.
		ErrorLog:     slog.NewLogLogger(logr.ToSlogHandler(log), slog.LevelDebug),
		ErrorHandler: fail,
	}
	limits := client.Limits{MaxBodyBytes: options.MaxBodyBytes, Timeout: options.ClientTimeout, Memory: options.Memory}
	if limits.Memory == nil {
		limits.Memory = client.NewMemory(options.MaxBodyBytes)
	}
	handler := client.WithBody(proxy, limits, fail)
	if options.Keys != nil {
		handler = authenticated(handler, &options, s.metrics, s.pool.waiters != nil, fail)
	}
	routes := newRoutes(options.PassThrough)
	handler = routes.Only(handler, func(w http.ResponseWriter, r *http.Request) { fail(w, r, errNoRoute) })
	handler = options.Recorder.Handler(handler, routes.Pattern, HeaderRequestID)
	return s.metrics.count(identified(handler), options.ClientTimeout)
}

// authenticated passes the requests of known clients on, without their keys. It rejects all others, and clients above
// their limits, before the body is read. Browsers send no key with a preflight (OPTIONS with
// Access-Control-Request-Method), which generates nothing. With named, the stages get the names of clients.
func authenticated(next http.Handler, options *ProxyOptions, m *metrics, named bool, fail func(http.ResponseWriter, *http.Request, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		reject := func(err error) {
			w.Header().Set("Connection", "close") // the server must not wait for the body
			fail(w, r, err)
		}
		name, err := options.Keys.Authenticate(r.Header) // removes the key
		if errors.Is(err, clientauth.ErrMissing) && isPreflight(r) {
			next.ServeHTTP(w, r)
			return
		}
		if err != nil {
			reject(err)
			return
		}
		m.clients.WithLabelValues(name).Inc()
		telemetry.Of(r.Context()).Authenticate(name)
		release, err := options.ClientLimits.Admit(name)
		if limit := (*clientauth.LimitError)(nil); errors.As(err, &limit) {
			m.limited.WithLabelValues(name, limit.Reason).Inc()
			reject(err)
			return
		}
		defer release()
		if named {
			r = r.WithContext(clientauth.WithClient(r.Context(), name))
		}
		next.ServeHTTP(w, r)
	})
}

// isPreflight reports whether a browser asks which requests are allowed. Such a request has no key and no body.
func isPreflight(r *http.Request) bool {
	return r.Method == http.MethodOptions && r.Header.Get("Access-Control-Request-Method") != "" && r.Header.Get("Origin") != "" && r.ContentLength == 0
}

// forward adds the client's address to the headers of the proxies in front of the router, and keeps the protocol and the
// host that the first of them has set. ReverseProxy has removed these headers.
func forward(r *httputil.ProxyRequest) {
	for _, name := range []string{"Forwarded", "X-Forwarded-For"} {
		if values := r.In.Header[name]; values != nil {
			r.Out.Header[name] = values
		}
	}
	r.SetXForwarded()
	for _, name := range []string{"X-Forwarded-Proto", "X-Forwarded-Host"} {
		if values := r.In.Header[name]; values != nil {
			r.Out.Header[name] = values
		}
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

// writeFailure answers a request that no engine has answered.
func writeFailure(w http.ResponseWriter, r *http.Request, err error, log logr.Logger) {
	var limit *clientauth.LimitError
	fail := func(code int, kind, message string) { wire.WriteError(w, r.URL.Path, code, kind, message) }
	switch {
	case errors.Is(err, clientauth.ErrMissing), errors.Is(err, clientauth.ErrWrong):
		w.Header().Set("WWW-Authenticate", "Bearer")
		fail(http.StatusUnauthorized, wire.Unauthenticated, err.Error())
	case errors.As(err, &limit):
		w.Header().Set("Retry-After", strconv.Itoa(int(max(time.Second, limit.RetryAfter+time.Second-1)/time.Second)))
		fail(http.StatusTooManyRequests, wire.RateLimited, err.Error()+"; retry later")
	case errors.Is(err, errNoRoute):
		fail(http.StatusNotFound, wire.NotFound, fmt.Sprintf("%s %s is %v", r.Method, r.URL.Path, err))
	case errors.Is(err, errLacksRoute):
		fail(http.StatusNotFound, wire.NotFound, lacksRoute(r.URL.Path))
	case errors.Is(err, errRankChosen), errors.Is(err, errTokenOutside), errors.Is(err, errPriority):
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
	case errors.Is(err, errAllFull), errors.Is(err, errQueueFull), errors.Is(err, errNoRoomToWait), errors.Is(err, errWaitedLong), errors.Is(err, client.ErrNoMemory):
		w.Header().Set("Retry-After", "1")
		fail(http.StatusTooManyRequests, wire.RateLimited, err.Error()+"; retry later")
	default:
		log.Error(err, "Request failed")
		fail(http.StatusBadGateway, wire.BadGateway, "the request could not be forwarded to a serving pod")
	}
}
