package router

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"

	"github.com/semmoe/operator/internal/buildinfo"
	"github.com/semmoe/operator/internal/httpserver"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/plans"
)

// Options are the settings of a router.
type Options struct {
	ProxyOptions
	// Pool are the settings by which ranks are chosen.
	Pool PoolOptions
	// Namespace and Selector find the engine pods.
	Namespace, Selector string
	// SnapshotDir is where the last known endpoints and the plans are kept.
	SnapshotDir string
	// TablesFile says whose tables are used in the place of a plan's own (see plans.WatchTables); empty where every plan uses its own.
	TablesFile string
	// DefaultPlan is the full digest of the plan of pods that name none; empty where such pods have none.
	DefaultPlan string
	// FetchPlan brings the plans of pods that have one; nil where there is no artifact store: then all requests are
	// balanced by load.
	FetchPlan plans.Fetch
	// Host is the address to listen on; Port is for clients, MetricsPort for probes and metrics.
	Host              string
	Port, MetricsPort int
	// PrivatePort serves observations and live samples to managers. ManagerAuthority holds the certificates, as PEM, that verify a
	// manager; without it the router does not listen on PrivatePort.
	PrivatePort      int
	ManagerAuthority []byte
	// EndpointPicker makes the router choose for a gateway, instead of sending the requests of clients itself: Port is not
	// used then. Nil for a proxy.
	EndpointPicker *EndpointPickerOptions
	// MaxConnections bounds the connections of clients, or the requests of gateways; 0 for the default of the server.
	MaxConnections int
	// ShutdownDelay is how long the router, once told to stop and no longer ready, still takes new connections, for clients
	// that have not seen yet that it goes.
	ShutdownDelay time.Duration
	// EndDelay ends ShutdownDelay early. Nil means never.
	EndDelay <-chan os.Signal
	// DrainTimeout bounds how long running requests may take after that.
	DrainTimeout time.Duration
}

// backends are those that were found as requests go to them: by plans that can be fetched, and to ranks of engines that take a rank.
func (o *Options) backends(found []discovery.Backend) []discovery.Backend {
	if o.FetchPlan != nil {
		found = discovery.WithDefaultPlan(found, o.DefaultPlan)
	}
	return discovery.Pinnable(found, o.adapter())
}

// plansName is the directory of the plans below the snapshot directory.
const plansName = "plans"

// headerTimeoutOf bounds how long a client may take to send the header of a request, which is short.
func headerTimeoutOf(options Options) time.Duration {
	if options.ClientTimeout > 0 {
		return min(httpserver.DefaultReadHeaderTimeout, options.ClientTimeout)
	}
	return httpserver.DefaultReadHeaderTimeout
}

// Run serves until the context ends, then lets the running requests finish.
func Run(ctx context.Context, clients kubernetes.Interface, options Options) error {
	log := logr.FromContextOrDiscard(ctx)
	pool, err := NewPoolWith(options.Pool)
	if err != nil {
		return err
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(buildinfo.Metric(), collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))

	var ready atomic.Bool
	service, observations, err := newFrontend(pool, registry, log, options)
	if err != nil {
		return err
	}
	probes := httpserver.NewProbes(probeRoutes(&ready, registry), log)
	probesListener, err := listen(options.Host, options.MetricsPort)
	if err != nil {
		return err
	}
	private, privateListener, err := listenPrivately(options, observations, log)
	if err != nil {
		return err
	}
	log.Info("Serving", "address", service.Addr().String(), "metricsAddress", probesListener.Addr().String())

	group, groupCtx := errgroup.WithContext(ctx)
	setReady := readyWithin(groupCtx, func(is bool) {
		ready.Store(is)
		service.SetReady(is)
	})
	if options.RankHeader == "" {
		log.Info("Balancing by load alone pods that do not name an engine: theirs takes no rank")
	}
	pins, settled := checkPins(pool, options.ProxyOptions, log), sync.Once{}
	group.Go(func() error { return pins.run(groupCtx) })
	set := func(found []discovery.Backend) { pool.Set(options.backends(found)) }
	if options.FetchPlan == nil {
		log.Info("Balancing by load alone: no artifact store is configured")
	} else {
		keeper := plans.NewKeeper(filepath.Join(options.SnapshotDir, plansName), options.FetchPlan, pool)
		set = func(found []discovery.Backend) {
			backends := options.backends(found)
			pool.Set(backends)
			keeper.Want(backends)
		}
		group.Go(func() error { return keeper.Run(groupCtx) })
		if options.TablesFile == "" {
			keeper.SetTables(nil)
		} else {
			group.Go(func() error { plans.WatchTables(groupCtx, options.TablesFile, keeper.SetTables); return nil })
		}
	}
	group.Go(func() error {
		return discovery.Watch(groupCtx, clients, options.Namespace, options.Selector, options.SnapshotDir, set, func() {
			settled.Do(func() { pins.settle(groupCtx) })
			setReady(true)
		})
	})
	group.Go(func() error { observations.engines.Run(groupCtx); return nil })
	group.Go(service.Serve)
	group.Go(func() error { return probes.Serve(probesListener) })
	if private != nil {
		group.Go(func() error { return private.Serve(privateListener) })
		context.AfterFunc(groupCtx, func() { private.Close() }) //nolint:errcheck // a manager asks again
	}
	group.Go(func() error {
		<-groupCtx.Done()
		setReady(false)
		log.Info("Draining")
		select {
		case <-time.After(options.ShutdownDelay):
		case <-options.EndDelay:
		}
		drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), options.DrainTimeout)
		defer cancel()
		return errors.Join(service.Shutdown(drain), probes.Close())
	})
	return group.Wait()
}

// readyWithin has set told no more that the router is ready once the context has ended: endpoints may still become known then.
func readyWithin(ctx context.Context, set func(bool)) func(bool) {
	var mu sync.Mutex
	return func(is bool) {
		mu.Lock()
		defer mu.Unlock()
		set(is && ctx.Err() == nil)
	}
}

// probeRoutes: the router is ready once it knows its endpoints, even if there are none: an answer that says so is better
// than a refused connection.
func probeRoutes(ready *atomic.Bool, registry *prometheus.Registry) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if !ready.Load() {
			http.Error(w, "endpoints not known yet, or draining", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	return mux
}

// closingUnless tells clients that their connection ends with the answer, unless the router is ready: they come back by
// another one, which leads elsewhere.
func closingUnless(ready *atomic.Bool, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !ready.Load() {
			w.Header().Set("Connection", "close")
		}
		next.ServeHTTP(w, r)
	})
}

func listen(host string, port int) (net.Listener, error) {
	return net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
}
