package server

import (
	"net/http"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Server answers HTTP requests; it is there before the model is loaded, so that health can say so.
type Server struct {
	engine   atomic.Pointer[Engine]
	draining atomic.Bool
	// member tells that another process of the same engine serves: health is all that this one answers.
	member  atomic.Bool
	mux     *http.ServeMux
	dialect Dialect
}

// handler answers requests to a route.
type handler func(*Engine, http.ResponseWriter, *http.Request) error

// New returns a server with the surface of a dialect. It is not ready.
func New(d Dialect) *Server {
	s := &Server{mux: http.NewServeMux(), dialect: d}
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

// SetMember makes the server one of an engine that another process serves.
func (s *Server) SetMember() { s.member.Store(true) }

// Drain makes health fail and refuses new requests. The returned channel is closed when no request is left.
func (s *Server) Drain() <-chan struct{} {
	s.draining.Store(true)
	if e := s.engine.Load(); e != nil {
		return e.Scheduler.Drain()
	}
	idle := make(chan struct{})
	close(idle)
	return idle
}

func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.mux.ServeHTTP(w, r) }

// ready returns the engine, or why there is none to use.
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

// whenReady answers 503 while there is no engine. What only reads goes on during a drain.
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
