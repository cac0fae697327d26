// SPDX-License-Identifier: Apache-2.0

package server

import (
	"crypto/subtle"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Server is the HTTP server. It starts before the model is loaded, so that health routes respond.
type Server struct {
	engine   atomic.Pointer[Engine]
	draining atomic.Bool
	// member is true if another process of the same engine serves. Then this process only responds to health requests.
	member  atomic.Bool
	mux     *http.ServeMux
	dialect Dialect
	apiKeys []string
}

// handler handles requests to a route.
type handler func(*Engine, http.ResponseWriter, *http.Request) error

// New returns a server with the API of a dialect. SetEngine makes it ready. If there are API keys, requests must contain one.
func New(d Dialect, apiKeys []string) *Server {
	s := &Server{mux: http.NewServeMux(), dialect: d, apiKeys: apiKeys}
	for _, path := range d.health {
		s.mux.HandleFunc(path, s.health)
	}
	for pattern, answer := range d.routes {
		s.mux.HandleFunc(pattern, s.whenReady(answer))
	}
	s.mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) { s.writeError(w, r, d.noRoute(s.mux, r)) })
	return s
}

// SetEngine makes the server ready.
func (s *Server) SetEngine(e *Engine) { s.engine.Store(e) }

// SetMember marks the server as a member of an engine that another process serves.
func (s *Server) SetMember() { s.member.Store(true) }

// Drain makes health requests fail and rejects new requests. The returned channel is closed when no requests are left.
func (s *Server) Drain() <-chan struct{} {
	s.draining.Store(true)
	if e := s.engine.Load(); e != nil {
		return e.Scheduler.Drain()
	}
	idle := make(chan struct{})
	close(idle)
	return idle
}

func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if len(s.apiKeys) > 0 && r.Method != http.MethodOptions && s.dialect.guards(r.URL.Path) && !bearsOneOf(r, s.apiKeys) {
		writeJSON(w, http.StatusUnauthorized, object{"error": "Unauthorized"}) // SGLang and vLLM have the same form
		return
	}
	s.mux.ServeHTTP(w, r)
}

// bearsOneOf reports whether a request contains one of the keys as a bearer token.
func bearsOneOf(r *http.Request, keys []string) bool {
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	return strings.EqualFold(scheme, "Bearer") && slices.ContainsFunc(keys, func(key string) bool {
		return subtle.ConstantTimeCompare([]byte(token), []byte(key)) == 1
	})
}

// ready returns the engine, or an error if it is not available.
func (s *Server) ready() (*Engine, error) {
	if s.draining.Load() {
		return nil, unavailable("the engine is shutting down")
	}
	if e := s.engine.Load(); e != nil {
		return e, nil
	}
	return nil, unavailable("the model is still being loaded")
}

func (s *Server) health(w http.ResponseWriter, r *http.Request) {
	if s.member.Load() {
		w.WriteHeader(http.StatusOK)
		return
	}
	if _, err := s.ready(); err != nil {
		s.writeError(w, r, err)
		return
	}
	w.WriteHeader(http.StatusOK)
}

// whenReady responds with status 503 while there is no engine. Read-only routes also work during a drain.
func (s *Server) whenReady(answer handler) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		e, err := s.ready()
		if loaded := s.engine.Load(); r.Method == http.MethodGet && loaded != nil {
			e, err = loaded, nil
		}
		if err == nil {
			err = answer(e, w, r)
		}
		if err != nil {
			s.writeError(w, r, err)
		}
	}
}

func (e *Engine) models(w http.ResponseWriter, _ *http.Request) error {
	card := map[string]any{
		"id": e.ServedName, "object": "model", "created": e.started.Unix(), "owned_by": "semmoe", "root": e.ServedName,
		"parent": nil, "max_model_len": e.ContextLength,
	}
	if e.Dialect.card != nil {
		e.Dialect.card(e, card)
	}
	writeJSON(w, http.StatusOK, map[string]any{"object": "list", "data": []any{card}})
	return nil
}

func (e *Engine) metricsPage(w http.ResponseWriter, r *http.Request) error {
	promhttp.HandlerFor(e.metrics.registry, promhttp.HandlerOpts{}).ServeHTTP(w, r)
	return nil
}
