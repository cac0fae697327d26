package router

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
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

	"github.com/semmoe/operator/internal/httpserver"
	"github.com/semmoe/operator/internal/httpserver/buildinfo"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/plans"
)

// Options configures a router.
type Options struct {
	ProxyOptions
	// Pool configures how ranks are chosen.
	Pool PoolOptions
	// Namespace and Selector select the engine pods.
	Namespace, Selector string
	// SnapshotDir stores the last known endpoints and the plans.
	SnapshotDir string
	// TablesFile maps plans to the plans that provide replacement tables (see plans.WatchTables). If it is empty, every
	// plan uses its own tables.
	TablesFile string
	// DefaultPlan is the full digest of the plan of pods that name none; empty if such pods have no plan.
	DefaultPlan string
	// FetchPlan fetches the plans that pods name. It is nil if there is no artifact store; all requests are then
	// balanced by load.
	FetchPlan plans.Fetch
	// Host is the address to listen on. Port serves clients, MetricsPort serves probes and metrics.
	Host              string
	Port, MetricsPort int
	// PrivatePort serves observations and live samples to managers. ManagerAuthority contains the PEM certificates that
	// verify a manager. If it is empty, the router does not listen on PrivatePort.
	PrivatePort      int
	ManagerAuthority []byte
	// EndpointPicker makes the router choose endpoints for a gateway instead of proxying requests; Port is then unused.
	// Nil selects the proxy.
	EndpointPicker *EndpointPickerOptions
	// MaxConnections is the maximum number of client connections, or of concurrent gateway requests; 0 selects the
	// default.
	MaxConnections int
	// ShutdownDelay is the time during which a stopping router, no longer ready, still accepts connections, because
	// clients may not have seen the change yet.
	ShutdownDelay time.Duration
	// EndDelay ends ShutdownDelay early. Nil means never.
	EndDelay <-chan os.Signal
	// DrainTimeout is the maximum time for running requests after ShutdownDelay.
	DrainTimeout time.Duration
}

// backends removes plans that cannot be fetched and ranks that the engines do not accept from the discovered backends.
func (o *Options) backends(found []discovery.Backend) []discovery.Backend {
	if o.FetchPlan != nil {
		found = discovery.WithDefaultPlan(found, o.DefaultPlan)
	}
	return discovery.Pinnable(found, o.adapter())
}

// plansName is the subdirectory of SnapshotDir that contains the plans.
const plansName = "plans"

// headerTimeoutOf returns the maximum time that a client may take to send a request header.
func headerTimeoutOf(options Options) time.Duration {
	if options.ClientTimeout > 0 {
		return min(httpserver.DefaultReadHeaderTimeout, options.ClientTimeout)
	}
	return httpserver.DefaultReadHeaderTimeout
}

// ballastBytes is memory that is allocated and never touched, so that it takes address space only. The garbage collector
// runs when the heap has doubled: without ballast, a router without a plan has a heap of a few MiB, and collects after
// every 40 requests of 8,000 tokens. A higher GOGC would have the same effect there, but would let the heap of a router
// with large plans grow in proportion.
const ballastBytes = 12 << 20

// Run serves until the context ends and then drains the running requests.
func Run(ctx context.Context, clients kubernetes.Interface, options Options) error {
	ballast := make([]byte, ballastBytes)
	defer runtime.KeepAlive(ballast)
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
		log.Info("Balancing pods that do not name an engine by load only: the default engine accepts no rank")
	}
	pins, settled := checkPins(pool, options.ProxyOptions, log), sync.Once{}
	group.Go(func() error { return pins.run(groupCtx) })
	set := func(found []discovery.Backend) { pool.Set(options.backends(found)) }
	if options.FetchPlan == nil {
		log.Info("Balancing by load only: no artifact store is configured")
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
		context.AfterFunc(groupCtx, func() { private.Close() }) //nolint:errcheck // a manager retries
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

// readyWithin returns set without effect for true once the context has ended: endpoints may still be discovered then.
func readyWithin(ctx context.Context, set func(bool)) func(bool) {
	var mu sync.Mutex
	return func(is bool) {
		mu.Lock()
		defer mu.Unlock()
		set(is && ctx.Err() == nil)
	}
}

// probeRoutes returns the handler of probes and metrics. The router is ready once it knows its endpoints, even if there
// are none: a 503 response with a reason is better than a refused connection.
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

// closingUnless closes each client connection with its response while the router is not ready. The client then
// reconnects to another router.
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
