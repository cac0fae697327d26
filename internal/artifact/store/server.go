// SPDX-License-Identifier: Apache-2.0

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

	"github.com/semmoe/operator/internal/certs"
	"github.com/semmoe/operator/internal/files/regularfile"
	"github.com/semmoe/operator/internal/httpserver"
	"github.com/semmoe/operator/internal/httpserver/buildinfo"
)

// maxConnections is enough for the pods of a large cluster that start at the same time. Each pod fetches one plan.
const maxConnections = 512

// Options are the settings of a store.
type Options struct {
	// URL is the URL of the bucket, see open.
	URL string
	// BindAddress is for clients (HTTPS), MetricsAddress for /healthz, /readyz and /metrics (HTTP).
	BindAddress, MetricsAddress string
	// TLSCertFile and TLSKeyFile are the paths of the server's certificate and key, as PEM. They are reloaded when they
	// change. If they are empty, the store uses its own CA.
	TLSCertFile, TLSKeyFile string
	// Authority is the name of the Secret and the ConfigMap of the store's CA. TLSHosts are the DNS names and IP
	// addresses of its certificate.
	Authority types.NamespacedName
	TLSHosts  []string
	// Manager is the ServiceAccount with all permissions.
	Manager types.NamespacedName
	// MaxArtifactBytes is the maximum size of an artifact.
	MaxArtifactBytes int64
	// DrainTimeout limits the time of running requests after a shutdown starts.
	DrainTimeout time.Duration
}

func (o *Options) validate() error {
	ownAuthority := o.TLSCertFile == ""
	switch {
	case (o.TLSCertFile == "") != (o.TLSKeyFile == ""):
		return errors.New("TLS certificate file and TLS key file: set both, or none to use the store's own certificate authority")
	case ownAuthority && (o.Authority.Namespace == "" || o.Authority.Name == ""):
		return fmt.Errorf("certificate authority: %q is invalid: must be namespace/name", o.Authority)
	case ownAuthority && len(o.TLSHosts) == 0:
		return errors.New("TLS hosts: at least one DNS name or IP address is required")
	case o.Manager.Namespace == "" || o.Manager.Name == "":
		return fmt.Errorf("ServiceAccount of the manager: %q is invalid: must be namespace/name", o.Manager)
	case o.MaxArtifactBytes <= 0:
		return fmt.Errorf("maximum artifact size: %d bytes is invalid: must be positive", o.MaxArtifactBytes)
	}
	return nil
}

// Run serves until the context ends, and then waits for running requests. It calls started, which may be nil, with the
// addresses after both servers accept connections.
func Run(ctx context.Context, clients kubernetes.Interface, options Options, started func(service, metrics net.Addr)) error {
	log := logr.FromContextOrDiscard(ctx)
	if err := options.validate(); err != nil {
		return err
	}
	store, err := open(ctx, options.URL)
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
	// There is no time limit for a whole request, because artifacts are large. The handler limits the time without
	// progress.
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
		if errors.Is(err, context.DeadlineExceeded) { // Close ends the remaining transfers, which leave no partial artifacts
			err = service.Close()
		}
		return errors.Join(err, probes.Close())
	})
	return group.Wait()
}

// certificates returns the source of the server's certificate.
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
		issuer := certs.NewIssuer(options.TLSHosts...)
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
			http.Error(w, "the store cannot reach its bucket; its log contains the cause", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	return mux
}
