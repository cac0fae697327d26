// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client/config"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/plan/bundle"
	"github.com/semmoe/operator/internal/router"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/expertload"
	"github.com/semmoe/operator/internal/router/livesamples"
	"github.com/semmoe/operator/internal/router/managerauth"
	"github.com/semmoe/operator/internal/router/picker"
	"github.com/semmoe/operator/internal/router/plans"
	"github.com/semmoe/operator/solver/dispatch"
)

// routerFlags are the flags of semmoe router.
type routerFlags struct {
	// options contains values that flags set directly; complete sets the others.
	options                                       router.Options
	engine, liveSamples, policy, weights, planDir string
	// backends lists engines without Kubernetes. ranks applies to those that are URLs.
	backends   string
	ranks      int
	gateway    gatewayFlags
	security   securityFlags
	telemetry  telemetryFlags
	resilience resilienceFlags
	logLevel   int
}

func newRouterCommand() *cobra.Command {
	var flags routerFlags
	command := &cobra.Command{
		Use:   "router",
		Short: "Route requests to the ranks of engine pods",
		Long: "Route requests to the ranks of the engine pods of one MoEDeployment or of a user-provided workload, or, with --backends, of engines without\n" +
			"Kubernetes. Ranks are selected by the plan that the pods name, or by the plan in --default-plan-dir. Plans are fetched from the artifact store\n" +
			"in the environment variables " + artifact.URLVariable + " and " + artifact.CAVariable + ", unless they are on disk already. Without a plan, ranks are selected by load\n" +
			"only. With --endpoint-picker, the router does not proxy requests: it is the endpoint picker\n" +
			"(ext_proc) of an InferencePool and selects endpoints for a gateway such as Envoy.",
		Args: cli.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			if err := flags.complete(command); err != nil {
				return err
			}
			return flags.run(command.Context())
		},
	}
	flags.add(command)
	return command
}

func (f *routerFlags) add(command *cobra.Command) {
	flags := command.Flags()
	cli.LogLevelFlag(flags, &f.logLevel)
	flags.StringVar(&f.options.Namespace, "namespace", "", "namespace of the engine pods")
	flags.StringVar(&f.options.Selector, "selector", "", "label selector of the engine pods")
	flags.StringVar(&f.backends, "backends", "", "engines without Kubernetes: URLs separated by commas, or a JSON or YAML file with a list of {address, name, ranks, engine, planDir, realization}, re-read after each change; replaces --namespace and --selector")
	flags.IntVar(&f.ranks, "ranks", 0, "number of ranks of each URL in --backends that requests can be pinned to (default: the ranks of the plan in --default-plan-dir, or 0: the engine selects the rank)")
	flags.StringVar(&f.options.Host, "host", "", "address to listen on (default: all)")
	flags.IntVar(&f.options.Port, "port", 8000, "port for clients")
	flags.IntVar(&f.options.MetricsPort, "metrics-port", 9090, "port for /healthz, /readyz and /metrics")
	flags.IntVar(&f.options.PrivatePort, "private-port", managerauth.Port, "port (TLS) for observations and live samples, for clients with a certificate of the authority in $"+managerauth.AuthorityVariable+" (PEM); closed if the variable is not set")
	flags.StringVar(&f.options.SnapshotDir, "snapshot-dir", "/var/lib/semmoe", "directory for plans and the last known endpoints, which allow the router to start without the API server")
	flags.StringVar(&f.options.TablesFile, "tables-file", "", "JSON file that maps the digest of a pod's plan to the digest of a plan with the same layout whose tables replace its own; optional, re-read every few seconds")
	flags.StringVar(&f.planDir, "default-plan-dir", "", "directory with the plan, or with its mounted ConfigMap, of pods that name no plan and of URLs in --backends; a plan directory needs no artifact store")
	flags.StringVar(&f.engine, "engine", "SGLang", "engine type of pods without the annotation "+semmoev1.AnnotationEngine+": "+registry.Types())
	flags.IntVar(&f.options.SamplePercent, "sample-percent", 0, "percentage of requests for which the engine returns the activated experts")
	flags.IntVar(&f.options.ExpertLoadSeries, "expert-load-series", expertload.DefaultSeries, fmt.Sprintf("number of experts with the highest and of experts with the lowest load that have separate metrics (0 to %d)", expertload.MaxSeries))
	flags.StringVar(&f.liveSamples, "live-samples", string(livesamples.Counts), "data kept about the tokens of sampled requests: counts (token ids, experts and hashed bigrams), sequences (also prompts and outputs as token ids) or none")
	defaults := router.DefaultPoolOptions()
	flags.StringVar(&f.policy, "policy", string(defaults.Policy), "dispatch policy: price, masked, round-robin, least-loaded or prefix")
	flags.Float64Var(&f.options.Pool.Cap, "cap", defaults.Cap, "maximum load of a rank over the last 128 requests, as a multiple of its fair share (policies price and prefix)")
	flags.StringVar(&f.weights, "weights", "", "scoring weights, for example affinity=1,prefix=1,load=1,wait=1; 1 is the modelled cost in microseconds, 0 ignores the component (policy price)")
	flags.DurationVar(&f.options.Pool.Hold, "hold", 0, "maximum time that a request waits for the rank of its experts while this rank has more than its share of the last 128 requests, up to "+dispatch.MaxWait.String()+": improves locality and delays the first token; 0 disables waiting (policy price)")
	flags.IntVar(&f.options.Pool.PendingLimitPerRank, "pending-limit-per-rank", 0, "maximum number of concurrent requests per rank of a pod; requests above the limit on all ranks get status 429; 0 means no limit")
	flags.IntVar(&f.options.Pool.CacheTokensPerRank, "cache-tokens-per-rank", defaults.CacheTokensPerRank, "assumed KV cache capacity per rank in tokens")
	flags.IntVar(&f.options.KVEventsPort, "kv-events-port", 0, "port at which rank 0 of an engine publishes KV events (ZeroMQ): rank r of n at this port plus r, with replays at this port plus n plus r; policies price and prefix then know the cached prefixes of prompts without a chat template; 0 means that all are estimated")
	flags.Int64Var(&f.options.MaxBodyBytes, "max-body-bytes", 32<<20, "maximum size of a request body in bytes; all request bodies together are limited to 384 MiB, and incomplete ones to 64 MiB or twice this value plus 1 MiB, whichever is larger")
	flags.IntVar(&f.options.MaxConnections, "max-connections", router.DefaultMaxConnections, "maximum number of client connections, or, with --endpoint-picker, of concurrent gateway requests")
	flags.StringSliceVar(&f.options.PassThrough, "pass-through", nil, fmt.Sprintf("comma-separated paths of up to %d further engine routes that clients may use; administrative routes are rejected", engine.MaxPassThrough))
	flags.DurationVar(&f.options.EndpointWait, "endpoint-wait", 10*time.Second, "maximum time that a request waits for a ready pod before it gets status 503")
	flags.DurationVar(&f.options.ClientTimeout, "client-timeout", time.Minute, "time limit for a client to send a request body, and to resume reading a response; 0 means no limit")
	flags.DurationVar(&f.options.ShutdownDelay, "shutdown-delay", 0, "time after SIGTERM during which the router is not ready but accepts new connections; a second signal ends it; not needed with a preStop hook that delays SIGTERM")
	flags.DurationVar(&f.options.DrainTimeout, "drain-timeout", 5*time.Minute, "time limit for in-flight requests after SIGTERM and --shutdown-delay")
	f.gateway.add(command)
	f.security.add(command)
	f.telemetry.add(command)
	f.resilience.add(command)
}

// maxConnectionsLimit is the maximum of --max-connections, maxTime of each time.
const (
	maxConnectionsLimit = 1 << 20
	maxTime             = 24 * time.Hour
)

// checkTimesAndPorts returns an error that names the first flag with an invalid time or port. Port 0 is a free port.
func (f *routerFlags) checkTimesAndPorts() error {
	o := &f.options
	for _, flag := range []struct {
		name string
		time time.Duration
	}{
		{"endpoint-wait", o.EndpointWait}, {"client-timeout", o.ClientTimeout}, {"shutdown-delay", o.ShutdownDelay}, {"drain-timeout", o.DrainTimeout},
	} {
		if flag.time < 0 || flag.time > maxTime {
			return fmt.Errorf("--%s is %v: want 0 to %v", flag.name, flag.time, maxTime)
		}
	}
	for _, flag := range []struct {
		name string
		port int
	}{
		{"port", o.Port}, {"metrics-port", o.MetricsPort}, {"private-port", o.PrivatePort}, {"kv-events-port", o.KVEventsPort}, {"ext-proc-port", f.gateway.port}, {"health-port", f.gateway.healthPort},
	} {
		if flag.port < 0 || flag.port > 65535 {
			return fmt.Errorf("--%s is %d: want 0 to 65535", flag.name, flag.port)
		}
	}
	return nil
}

// maxBodyBytesLimit is the maximum of --max-body-bytes, far above the size of a request of any model.
const maxBodyBytesLimit = 64 << 30

// complete checks the flags and sets the options that depend on several of them.
func (f *routerFlags) complete(command *cobra.Command) (err error) {
	o := &f.options
	if err := f.completeSource(command); err != nil {
		return err
	}
	if o.MaxBodyBytes < 0 || o.MaxBodyBytes > maxBodyBytesLimit {
		return fmt.Errorf("--max-body-bytes is %d: want 0 to %d", o.MaxBodyBytes, int64(maxBodyBytesLimit))
	}
	if o.MaxConnections < 1 || o.MaxConnections > maxConnectionsLimit {
		return fmt.Errorf("--max-connections is %d: want 1 to %d", o.MaxConnections, maxConnectionsLimit)
	}
	if err := f.checkTimesAndPorts(); err != nil {
		return err
	}
	if len(o.PassThrough) > engine.MaxPassThrough {
		return fmt.Errorf("--pass-through has %d paths; want %d at most", len(o.PassThrough), engine.MaxPassThrough)
	}
	for _, path := range o.PassThrough {
		if err := registry.CheckPassThrough(path); err != nil {
			return fmt.Errorf("--pass-through: %w", err)
		}
	}
	if err := f.completeEngine(); err != nil {
		return err
	}
	if o.LiveSamples, err = livesamples.Parse(f.liveSamples); err != nil {
		return fmt.Errorf("--live-samples: %w", err)
	}
	if o.EndpointPicker, err = f.gateway.options(); err != nil {
		return err
	}
	for _, name := range []string{"ext-proc-port", "health-port", "fallbacks"} {
		if o.EndpointPicker == nil && command.Flags().Changed(name) {
			return fmt.Errorf("--%s requires --endpoint-picker", name)
		}
	}
	if err := errors.Join(f.security.complete(o, &f.gateway), f.telemetry.complete(o), f.resilience.complete(command, o)); err != nil {
		return err
	}
	if o.EndpointPicker != nil && o.Pool.Hold != 0 {
		return fmt.Errorf("--hold is %v, but with --endpoint-picker requests do not wait because gateways have their own deadlines; want 0", o.Pool.Hold)
	}
	if o.Pool.Policy, err = dispatch.ParsePolicy(f.policy); err != nil {
		return fmt.Errorf("--policy: %w", err)
	}
	if o.Pool.Weights, err = dispatch.ParseWeights(f.weights); err != nil {
		return fmt.Errorf("--weights: %w", err)
	}
	o.ManagerAuthority = []byte(os.Getenv(managerauth.AuthorityVariable))
	return o.Pool.Validate()
}

// podFlags are the flags that apply to pods only.
var podFlags = []string{"namespace", "selector", "snapshot-dir", "tables-file"}

// completeSource sets the options for finding backends and their plans.
func (f *routerFlags) completeSource(command *cobra.Command) error {
	o := &f.options
	if f.backends != "" {
		for _, name := range podFlags {
			if command.Flags().Changed(name) {
				return fmt.Errorf("--%s applies to pods: it cannot be combined with --backends", name)
			}
		}
		list, err := discovery.NewList(f.backends, discovery.ListDefaults{Engine: f.engine, Ranks: f.ranks, PlanDir: f.planDir})
		if err != nil {
			return fmt.Errorf("--backends: %w", err)
		}
		o.Source, o.LocalPlan, o.SnapshotDir = list.Watch, list.PlanDir, ""
		return nil
	}
	switch {
	case o.Namespace == "" || o.Selector == "":
		return errors.New("--namespace and --selector are required to find the engine pods; without Kubernetes, --backends lists the engines")
	case f.ranks != 0:
		return errors.New("--ranks applies to the URLs in --backends; pods have the annotation " + semmoev1.AnnotationRanks)
	}
	o.FetchPlan = planFetcher(o.Namespace)
	if f.planDir == "" {
		return nil
	}
	mounted, err := bundle.Check(f.planDir, "")
	if err != nil {
		return fmt.Errorf("--default-plan-dir: %w", err)
	}
	o.DefaultPlan = string(mounted.Digest)
	if _, err := os.Stat(filepath.Join(f.planDir, plan.TablesFile)); err == nil { // absent in a ConfigMap
		o.LocalPlan = func(digest string) string {
			if digest == o.DefaultPlan {
				return f.planDir
			}
			return ""
		}
	}
	return nil
}

// completeEngine sets the options of the engine type and returns an error for options that the engine does not support.
func (f *routerFlags) completeEngine() error {
	o := &f.options
	adapter, err := registry.For(f.engine)
	if err != nil {
		return err
	}
	if o.SamplePercent < 0 || o.SamplePercent > 100 {
		return fmt.Errorf("--sample-percent is %d: want 0 to 100", o.SamplePercent)
	}
	if o.ExpertLoadSeries < 0 || o.ExpertLoadSeries > expertload.MaxSeries {
		return fmt.Errorf("--expert-load-series is %d: want 0 to %d", o.ExpertLoadSeries, expertload.MaxSeries)
	}
	if o.SamplePercent > 0 && !adapter.ReportsRoutedExperts() {
		return fmt.Errorf("--sample-percent is %d: engine %s does not report the experts of a request; want 0", o.SamplePercent, f.engine)
	}
	o.RankHeader, o.RoutingKeyHeader, o.RoutedExperts = adapter.RankHeader, adapter.RoutingKeyHeader, adapter.RoutedExperts
	o.TokenizePath, o.RankRoutes = adapter.Generation.TokenizePath, adapter.RankRoutes
	return nil
}

func (f *routerFlags) run(ctx context.Context) error {
	var clients kubernetes.Interface
	if f.options.Source == nil {
		rest, err := config.GetConfig()
		if err != nil {
			return err
		}
		if clients, err = kubernetes.NewForConfig(rest); err != nil {
			return err
		}
	}
	second := make(chan os.Signal, 1)
	defer context.AfterFunc(ctx, func() { signal.Notify(second, os.Interrupt, syscall.SIGTERM) })()
	f.options.EndDelay = second
	cli.Drains(ctx)
	return router.Run(cli.WithLogger(ctx, "router", f.logLevel), clients, f.options)
}

// maxFallbacks limits the size of a header; more fallback endpoints are useless.
const maxFallbacks = 16

// gatewayFlags are the flags of a router that selects endpoints for a gateway.
type gatewayFlags struct {
	on, plaintext    bool
	port, healthPort int
	fallbacks        int
	// certFile, keyFile and clientCAFile are the TLS files.
	certFile, keyFile, clientCAFile string
}

func (g *gatewayFlags) add(command *cobra.Command) {
	flags := command.Flags()
	flags.BoolVar(&g.on, "endpoint-picker", false, "select endpoints for a gateway (Envoy ext_proc, endpoint picker protocol 1.0) instead of proxying; disables --port and --endpoint-wait")
	flags.IntVar(&g.port, "ext-proc-port", 9002, "port for gateways, with --endpoint-picker")
	flags.IntVar(&g.healthPort, "health-port", 9003, "port for gRPC health checks without TLS, with --endpoint-picker")
	flags.IntVar(&g.fallbacks, "fallbacks", 2, "number of fallback endpoints for a gateway, with --endpoint-picker; 0 for gateways that read a single endpoint, such as Envoy's ORIGINAL_DST cluster")
	flags.StringVar(&g.certFile, "tls-cert-file", "", "PEM file with the certificate for clients or gateways, re-read for each connection (default: plain text for clients, a self-signed certificate for gateways)")
	flags.StringVar(&g.keyFile, "tls-key-file", "", "PEM file with the private key of --tls-cert-file")
	flags.StringVar(&g.clientCAFile, "tls-client-ca-file", "", "PEM file with the certificate authorities of clients or gateways, re-read for each connection; requires them to have a certificate (default: no client certificates)")
	flags.BoolVar(&g.plaintext, "plaintext", false, "gateway connections without TLS")
}

// options returns nil if the router is a proxy.
func (g *gatewayFlags) options() (*router.EndpointPickerOptions, error) {
	switch {
	case !g.on && g.plaintext:
		return nil, errors.New("--plaintext requires --endpoint-picker: clients get plain text unless --tls-cert-file is set")
	case g.fallbacks < 0 || g.fallbacks > maxFallbacks:
		return nil, fmt.Errorf("--fallbacks is %d: want 0 to %d", g.fallbacks, maxFallbacks)
	case (g.certFile == "") != (g.keyFile == ""):
		return nil, fmt.Errorf("--tls-cert-file is %q and --tls-key-file %q: want both, or neither", g.certFile, g.keyFile)
	case !g.on && g.clientCAFile != "" && g.certFile == "":
		return nil, errors.New("--tls-client-ca-file requires --tls-cert-file: client certificates need TLS")
	case !g.on:
		return nil, nil
	case g.plaintext && (g.certFile != "" || g.clientCAFile != ""):
		return nil, errors.New("--plaintext contradicts --tls-cert-file and --tls-client-ca-file: want one of them")
	}
	options := &router.EndpointPickerOptions{Port: g.port, HealthPort: g.healthPort, Fallbacks: g.fallbacks}
	if g.plaintext {
		return options, nil
	}
	var err error
	options.TLS, err = picker.TLSConfig(g.certFile, g.keyFile, g.clientCAFile)
	return options, err
}

// storeRetry is the time limit of one attempt to fetch a plan from an unavailable store; attempts are repeated with
// pauses.
const storeRetry = 10 * time.Second

// planFetcher returns a function that fetches the plans of a namespace from the artifact store in the environment
// variables. A plan on disk needs neither the store nor its token. It creates a client for each plan: a token that
// cannot be read yet only fails an attempt, not the router.
func planFetcher(namespace string) plans.Fetch {
	return func(ctx context.Context, digest, dir string) error {
		if bundle.IsComplete(dir, digest) {
			return nil
		}
		if os.Getenv(artifact.URLVariable) == "" && os.Getenv(artifact.CAVariable) == "" {
			return errors.New("the plan is not on disk, and no artifact store is configured")
		}
		client, err := access.FromPod(storeRetry)
		if err != nil {
			return err
		}
		return bundle.Fetch(ctx, client, namespace, digest, dir)
	}
}
