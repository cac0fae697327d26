// SPDX-License-Identifier: Apache-2.0

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
	"github.com/semmoe/operator/internal/router/kvevents"
	"github.com/semmoe/operator/internal/router/plans"
	"github.com/semmoe/operator/internal/router/telemetry"
	"github.com/semmoe/operator/internal/router/tlsfiles"
)

// Options configures a router.
type Options struct {
	ProxyOptions
	// Pool configures how ranks are chosen.
	Pool PoolOptions
	// Source finds the backends. If it is nil, they are the engine pods that Namespace and Selector select.
	Source              discovery.Source
	Namespace, Selector string
	// SnapshotDir stores the last known endpoints and the plans. Without it, only the plans of LocalPlan are used.
	SnapshotDir string
	// TablesFile maps plans to the plans that provide replacement tables (see plans.WatchTables). If it is empty, every
	// plan uses its own tables.
	TablesFile string
	// DefaultPlan is the full digest of the plan of pods that name none; empty if such pods have no plan.
	DefaultPlan string
	// KVEventsPort is the port of rank 0 of the KV events of engine pods (kvevents.New). 0 disables KV events.
	KVEventsPort int
	// FetchPlan fetches the plans that pods name. LocalPlan returns the directory with a plan that is on disk already,
	// or an empty string. If both are nil, all requests are balanced by load.
	FetchPlan plans.Fetch
	LocalPlan func(digest string) string
	// Host is the address to listen on. Port serves clients, MetricsPort serves probes and metrics.
	Host              string
	Port, MetricsPort int
	// PrivatePort serves observations and live samples to managers. ManagerAuthority contains the PEM certificates that
	// verify a manager. If it is empty, the router does not listen on PrivatePort.
	PrivatePort      int
	ManagerAuthority []byte
	// TLS contains the certificate for clients, and the authorities of client certificates; nil serves plain text. An
	// endpoint picker has its own.
	TLS *tlsfiles.Files
	// Telemetry configures spans and the access log of the proxy. PprofAddress is host:port for profiles of the process;
	// empty means none.
	Telemetry    telemetry.Options
	PprofAddress string
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
	if o.usesPlans() {
		found = discovery.WithDefaultPlan(found, o.DefaultPlan)
	}
	if o.Engines.RequireTLS {
		found = discovery.WithTLS(found)
	}
	return discovery.Pinnable(found, o.adapter())
}

func (o *Options) usesPlans() bool { return o.FetchPlan != nil || o.LocalPlan != nil }

// plansDir returns the directory of the fetched plans; empty without SnapshotDir.
func (o *Options) plansDir() string {
	if o.SnapshotDir == "" {
		return ""
	}
	return filepath.Join(o.SnapshotDir, plansName)
}

// source returns the Source of the backends.
func (o *Options) source(clients kubernetes.Interface) discovery.Source {
	if o.Source != nil {
		return o.Source
	}
	return discovery.Pods(clients, o.Namespace, o.Selector, o.SnapshotDir)
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

// Run serves until the context ends and then drains the running requests. clients may be nil if the options have a
// Source.
func Run(ctx context.Context, clients kubernetes.Interface, options Options) error {
	ballast := make([]byte, ballastBytes)
	defer runtime.KeepAlive(ballast)
	log := logr.FromContextOrDiscard(ctx)
	pool, err := NewPoolWith(options.Pool)
	if err != nil {
		return err
	}
	options.Engines.Log = log
	registry := prometheus.NewRegistry()
	registry.MustRegister(buildinfo.Metric(), collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))

	if options.Recorder, err = telemetry.New(ctx, options.Telemetry, registry); err != nil {
		return err
	}
	profiles, profilesListener, err := listenForPprof(options.PprofAddress, log)
	if err != nil {
		return err
	}

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
	follow := func([]discovery.Backend) {}
	if options.KVEventsPort > 0 {
		pool.events = kvevents.New(options.KVEventsPort, log)
		registry.MustRegister(pool.events.Collectors()...)
		follow = func(backends []discovery.Backend) { pool.events.Set(eventTargets(backends)) }
		group.Go(func() error { pool.events.Run(groupCtx); return nil })
	}
	set := func(found []discovery.Backend) {
		backends := options.backends(found)
		pool.Set(backends)
		follow(backends)
	}
	if !options.usesPlans() {
		log.Info("Balancing by load only: neither plans nor an artifact store are configured")
	} else {
		keeper := plans.NewKeeper(options.plansDir(), options.FetchPlan, pool)
		keeper.Local = options.LocalPlan
		set = func(found []discovery.Backend) {
			backends := options.backends(found)
			pool.Set(backends)
			follow(backends)
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
		return options.source(clients)(groupCtx, set, func() {
			settled.Do(func() { pins.settle(groupCtx) })
			setReady(true)
		})
	})
	group.Go(func() error { observations.engines.Run(groupCtx); return nil })
	group.Go(func() error { options.TLS.Watch(groupCtx); return nil })
	group.Go(func() error { options.Engines.TLS.Watch(groupCtx); return nil })
	if options.Keys != nil {
		group.Go(func() error { options.Keys.Watch(groupCtx); return nil })
	}
	group.Go(service.Serve)
	group.Go(func() error { return probes.Serve(probesListener) })
	if private != nil {
		group.Go(func() error { return private.Serve(privateListener) })
		context.AfterFunc(groupCtx, func() { private.Close() }) //nolint:errcheck // a manager retries
	}
	if profiles != nil {
		group.Go(func() error { return profiles.Serve(profilesListener) })
		context.AfterFunc(groupCtx, func() { profiles.Close() }) //nolint:errcheck // profiles need no drain
	}
	// The last requests are recorded after the drain.
	recorded, endRecords := context.WithCancel(context.WithoutCancel(ctx))
	group.Go(func() error { options.Recorder.Run(recorded); return nil })
	group.Go(func() error {
		defer endRecords()
		<-groupCtx.Done()
		setReady(false)
		log.Info("Draining")
		select {
		case <-time.After(options.ShutdownDelay):
		case <-options.EndDelay:
		}
		drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), options.DrainTimeout)
		defer cancel()
		err := errors.Join(service.Shutdown(drain), probes.Close())
		options.Recorder.Close(ctx)
		return err
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
