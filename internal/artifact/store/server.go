package store

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/certwatcher"

	"github.com/semmoe/operator/internal/authority"
	"github.com/semmoe/operator/internal/buildinfo"
	"github.com/semmoe/operator/internal/httpserver"
	"github.com/semmoe/operator/internal/regularfile"
)

// maxConnections is for the pods of a large cluster that start at the same time: each fetches one plan.
const maxConnections = 512

// Options are the settings of a store.
type Options struct {
	// URL names the bucket, see Open.
	URL string
	// BindAddress is for clients (HTTPS), MetricsAddress for /healthz, /readyz and /metrics (HTTP).
	BindAddress, MetricsAddress string
	// TLSCertFile and TLSKeyFile hold the server's certificate and key, as PEM. They are read anew when they change.
	// Without them the store has its own certificate authority.
	TLSCertFile, TLSKeyFile string
	// Authority names the Secret and the ConfigMap of the store's own authority, TLSHosts the names and addresses that
	// its certificate is for.
	Authority types.NamespacedName
	TLSHosts  []string
	// Manager is the ServiceAccount that may do everything.
	Manager types.NamespacedName
	// MaxArtifactBytes is the size of the largest artifact that is stored.
	MaxArtifactBytes int64
	// DrainTimeout bounds how long running requests may take once the store was told to stop.
	DrainTimeout time.Duration
}

func (o *Options) validate() error {
	ownAuthority := o.TLSCertFile == ""
	switch {
	case (o.TLSCertFile == "") != (o.TLSKeyFile == ""):
		return errors.New("TLS certificate file and TLS key file: give both, or none for an own certificate authority")
	case ownAuthority && (o.Authority.Namespace == "" || o.Authority.Name == ""):
		return fmt.Errorf("certificate authority %q: must be namespace/name", o.Authority)
	case ownAuthority && len(o.TLSHosts) == 0:
		return errors.New("TLS hosts: at least one name or address that clients use is required")
	case o.Manager.Namespace == "" || o.Manager.Name == "":
		return fmt.Errorf("manager's ServiceAccount %q: must be namespace/name", o.Manager)
	case o.MaxArtifactBytes <= 0:
		return fmt.Errorf("largest artifact: %d bytes: must be positive", o.MaxArtifactBytes)
	}
	return nil
}

// Run serves until the context ends, then lets the running requests finish. started is called with the addresses once
// both accept connections; it may be nil.
func Run(ctx context.Context, clients kubernetes.Interface, options Options, started func(service, metrics net.Addr)) error {
	log := logr.FromContextOrDiscard(ctx)
	if err := options.validate(); err != nil {
		return err
	}
	store, err := Open(ctx, options.URL)
	if err != nil {
		return err
	}
	defer store.Close()
	group, groupCtx := errgroup.WithContext(ctx)
	certificate, err := certificates(groupCtx, group, clients, options)
	if err != nil {
		return err
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(buildinfo.Metric())
	m := newMetrics(registry)
	watchSpace(registry, store)
	routes := &handler{
		store:    store,
		identify: newReviewer(clients, options.Manager, m).identify,
		metrics:  m,
		log:      log,
		maxBytes: options.MaxArtifactBytes,
		uploads:  uploads{max: maxUploads},
	}
	if store.dir == nil {
		routes.uploads.max = maxBucketUploads
	}
	// There is no limit of a whole request, since artifacts are large: the handler limits how long a transfer may stop.
	service := httpserver.New(httpserver.Options{
		Handler: routes.routes(), Log: log, MaxConnections: maxConnections,
		TLS: &tls.Config{MinVersion: tls.VersionTLS13, GetCertificate: certificate},
	})
	probes := httpserver.NewProbes(probeRoutes(store, registry, log), log)

	serviceListener, err := net.Listen("tcp", options.BindAddress)
	if err != nil {
		return err
	}
	probesListener, err := net.Listen("tcp", options.MetricsAddress)
	if err != nil {
		serviceListener.Close()
		return err
	}
	log.Info("Serving", "url", options.URL, "address", serviceListener.Addr().String(), "metricsAddress", probesListener.Addr().String())
	if started != nil {
		started(serviceListener.Addr(), probesListener.Addr())
	}
	group.Go(func() error { return service.Serve(serviceListener) })
	group.Go(func() error { return probes.Serve(probesListener) })
	group.Go(func() error {
		<-groupCtx.Done()
		log.Info("Draining")
		drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), options.DrainTimeout)
		defer cancel()
		err := service.Shutdown(drain)
		if errors.Is(err, context.DeadlineExceeded) { // transfers that are left end now, and leave nothing behind
			err = service.Close()
		}
		return errors.Join(err, probes.Close())
	})
	return group.Wait()
}

// certificates returns where the server's certificate comes from.
func certificates(ctx context.Context, group *errgroup.Group, clients kubernetes.Interface, options Options) (func(*tls.ClientHelloInfo) (*tls.Certificate, error), error) {
	if options.TLSCertFile == "" {
		own, certificate, err := loadAuthority(ctx, clients, options.Authority)
		if err != nil {
			return nil, err
		}
		group.Go(func() error {
			keepPublished(ctx, clients, options.Authority, certificate, publishPeriod)
			return nil
		})
		issuer := authority.NewIssuer(options.TLSHosts...)
		issuer.Use(own)
		return issuer.Certificate, nil
	}
	if err := errors.Join(regularfile.Check(options.TLSCertFile), regularfile.Check(options.TLSKeyFile)); err != nil {
		return nil, fmt.Errorf("TLS certificate file: %w", err)
	}
	watcher, err := certwatcher.New(options.TLSCertFile, options.TLSKeyFile)
	if err != nil {
		return nil, fmt.Errorf("TLS certificate file %s, key file %s: %w", options.TLSCertFile, options.TLSKeyFile, err)
	}
	group.Go(func() error { return watcher.Start(ctx) })
	return watcher.GetCertificate, nil
}

func probeRoutes(store *Store, registry *prometheus.Registry, log logr.Logger) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		if err := store.Ready(r.Context()); err != nil {
			log.Info("Not ready", "reason", err.Error())
			http.Error(w, "the store cannot reach its bucket; its log has the cause", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	return mux
}
