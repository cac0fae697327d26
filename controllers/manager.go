// SPDX-License-Identifier: Apache-2.0

// Package controllers puts the operator's controllers into one manager.
package controllers

import (
	"cmp"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/selection"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
	leaderworkersetv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/affinityprofile"
	"github.com/semmoe/operator/controllers/moedeployment"
	"github.com/semmoe/operator/controllers/placementplan"
	"github.com/semmoe/operator/controllers/retention"
	"github.com/semmoe/operator/controllers/statemetrics"
	"github.com/semmoe/operator/controllers/storewatch"
	"github.com/semmoe/operator/controllers/watchmetrics"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/httpserver/buildinfo"
	"github.com/semmoe/operator/internal/observation/promquery"
	"github.com/semmoe/operator/internal/router/managerauth"
)

// Options are the settings of the operator.
type Options struct {
	// Image is the image of the operator's own containers: request router and inspection.
	Image string
	// PullPolicy is when nodes pull it; empty leaves that to the API server.
	PullPolicy corev1.PullPolicy
	// OwnNamespace is the operator's own; empty where it runs outside of the cluster.
	OwnNamespace string
	// Namespaces to watch; none means all.
	Namespaces []string
	// HTTP reaches the pods of engines and profiling Jobs; nil means directly.
	HTTP *http.Client
	// Routers is the identity with which the manager reads from request routers.
	Routers *managerauth.Identity
	// Store is how the artifact store is reached; its Reader is filled in where it has none. Without a
	// URL nothing can be profiled.
	Store *access.Access
	// PrometheusHosts are the hosts that objects of every namespace may name as Prometheus servers.
	PrometheusHosts promquery.Hosts
	// SolverWorkers is how many plans are solved at a time, each with a routing trace in memory; at least one.
	SolverWorkers int
	// Retention is how long artifacts are kept that nothing names; zero means retention.DefaultRetention.
	Retention time.Duration
	// Now is the clock by which controllers decide; nil means time.Now.
	Now func() time.Time
}

// Scheme knows every kind that the operator reads or writes.
func Scheme() (*runtime.Scheme, error) {
	scheme := runtime.NewScheme()
	return scheme, errors.Join(clientgoscheme.AddToScheme(scheme), semmoev1.AddToScheme(scheme), leaderworkersetv1.AddToScheme(scheme))
}

// NewManager returns a manager that runs all controllers once it is started. What base leaves open (scheme, cache) is
// filled in; the rest of it, such as leader election and metrics, is the caller's.
func NewManager(config *rest.Config, options Options, base ctrl.Options) (ctrl.Manager, error) {
	if options.Image == "" {
		return nil, errors.New("the image of the operator's own containers is not set")
	}
	if options.Routers == nil {
		return nil, errors.New("the identity for request routers is not set")
	}
	scheme, err := Scheme()
	if err != nil {
		return nil, err
	}
	base.Scheme = scheme
	if options.Now == nil {
		options.Now = time.Now
	}
	base.Cache = cacheOptions(options.Namespaces)
	refusals := watchmetrics.New(options.Now)
	base.Cache.DefaultWatchErrorHandler = refusals.Handle
	manager, err := ctrl.NewManager(config, base)
	if err != nil {
		return nil, fmt.Errorf("create manager: %w", err)
	}
	if err := errors.Join(manager.AddHealthzCheck("ping", healthz.Ping), manager.AddReadyzCheck("ping", healthz.Ping)); err != nil {
		return nil, err
	}
	if options.Store != nil && options.Store.Reader == nil {
		options.Store.Reader = manager.GetAPIReader()
	}
	options.HTTP = cmp.Or(options.HTTP, podClient())
	if err := errors.Join(register(buildinfo.Metric()), register(refusals)); err != nil {
		return nil, fmt.Errorf("register the metrics of the build and of watches: %w", err)
	}
	return manager, addControllers(manager, options)
}

// podClient returns the client for requests to pods of engines and Jobs. It verifies no certificate, as the probes of the
// kubelet: the manager has no right to read the Secret with the authorities of engines.
func podClient() *http.Client {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.TLSClientConfig = &tls.Config{InsecureSkipVerify: true}
	return &http.Client{Transport: transport, CheckRedirect: managerauth.RefuseRedirect}
}

// registering keeps two managers of one process, as tests have them, from registering metrics of one name at the same time.
var registering sync.Mutex

// register registers metrics of a manager. One that is started anew in the same process takes over from the one before.
func register(collector prometheus.Collector) error {
	registering.Lock()
	defer registering.Unlock()
	metrics.Registry.Unregister(collector)
	return metrics.Registry.Register(collector)
}

func addControllers(manager ctrl.Manager, options Options) error {
	availability := storewatch.New(options.Store, options.Now)
	if err := errors.Join(register(availability), manager.Add(availability)); err != nil {
		return fmt.Errorf("set up the watch of the artifact store: %w", err)
	}
	deployments := &moedeployment.Reconciler{
		Client:     manager.GetClient(),
		Live:       manager.GetAPIReader(),
		Secrets:    manager.GetAPIReader(),
		Recorder:   manager.GetEventRecorder("semmoe-moedeployment"),
		HTTP:       options.HTTP,
		Routers:    *options.Routers,
		Prometheus: &promquery.Client{Hosts: options.PrometheusHosts, Services: manager.GetAPIReader()},
		Metrics:    moedeployment.NewMetrics(options.Now),
		Store:      options.Store,
		StoreWatch: availability,
		Image:      options.Image,
		PullPolicy: options.PullPolicy,
		Namespace:  options.OwnNamespace,
		Now:        options.Now,
	}
	if err := register(deployments.Metrics); err != nil {
		return fmt.Errorf("register the metrics of MoEDeployments: %w", err)
	}
	states := &statemetrics.Collector{Reader: manager.GetCache(), Elected: manager.Elected(), Log: manager.GetLogger().WithName("metrics")}
	if err := register(states); err != nil {
		return fmt.Errorf("register the metrics of conditions: %w", err)
	}
	if err := deployments.SetupWithManager(manager); err != nil {
		return fmt.Errorf("set up the MoEDeployment controller: %w", err)
	}
	profiles := &affinityprofile.Reconciler{
		Client:     manager.GetClient(),
		Events:     manager.GetAPIReader(),
		Recorder:   manager.GetEventRecorder("semmoe-affinityprofile"),
		HTTP:       options.HTTP,
		Routers:    *options.Routers,
		Store:      options.Store,
		Image:      options.Image,
		PullPolicy: options.PullPolicy,
		Now:        options.Now,
	}
	if err := profiles.SetupWithManager(manager); err != nil {
		return fmt.Errorf("set up the AffinityProfile controller: %w", err)
	}
	plans := &placementplan.Reconciler{
		Client:   manager.GetClient(),
		Live:     manager.GetAPIReader(),
		Recorder: manager.GetEventRecorder("semmoe-placementplan"),
		Store:    options.Store,
		Workers:  options.SolverWorkers,
		Now:      options.Now,
	}
	if err := plans.SetupWithManager(manager); err != nil {
		return fmt.Errorf("set up the PlacementPlan controller: %w", err)
	}
	sweeper := &retention.Sweeper{Reader: manager.GetAPIReader(), Store: options.Store, Namespaces: options.Namespaces, Retention: options.Retention, Now: options.Now}
	if err := manager.Add(sweeper); err != nil {
		return fmt.Errorf("set up the retention of artifacts: %w", err)
	}
	return nil
}

// cacheOptions keep only what the operator made in memory: a cluster has many more pods than ours.
func cacheOptions(namespaces []string) cache.Options {
	requirement, err := labels.NewRequirement(semmoev1.LabelComponent, selection.Exists, nil)
	if err != nil {
		panic(err) // a constant requirement
	}
	ours := cache.ByObject{Label: labels.NewSelector().Add(*requirement)}
	options := cache.Options{ByObject: map[client.Object]cache.ByObject{}}
	for _, object := range []client.Object{
		&appsv1.StatefulSet{}, &appsv1.Deployment{}, &batchv1.Job{}, &corev1.Pod{}, &corev1.Service{},
		&corev1.ConfigMap{}, &corev1.ServiceAccount{}, &policyv1.PodDisruptionBudget{}, &rbacv1.RoleBinding{},
		&networkingv1.NetworkPolicy{},
	} {
		options.ByObject[object] = ours
	}
	for _, namespace := range namespaces {
		if options.DefaultNamespaces == nil {
			options.DefaultNamespaces = map[string]cache.Config{}
		}
		options.DefaultNamespaces[namespace] = cache.Config{}
	}
	return options
}
