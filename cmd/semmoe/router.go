package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client/config"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/plan/bundle"
	"github.com/semmoe/operator/internal/router"
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
	gateway                                       gatewayFlags
	logLevel                                      int
}

func newRouterCommand() *cobra.Command {
	var flags routerFlags
	command := &cobra.Command{
		Annotations: map[string]string{cli.Drains: "true"},
		Use:         "router",
		Short:       "Route requests to the ranks of engine pods",
		Long: "Route requests to the ranks of the engine pods of one MoEDeployment or of a user-provided workload. Ranks are selected by the plan that\n" +
			"the pods name, or by the plan in --default-plan-dir. Plans are fetched from the artifact store in the environment variables\n" + artifact.URLVariable + " and " + artifact.CAVariable + ";\n" +
			"without a plan, ranks are selected by load only. With --endpoint-picker, the router does not proxy requests: it is the endpoint picker\n" +
			"(ext_proc) of an InferencePool and selects endpoints for a gateway such as Envoy.",
		Args: cli.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			if err := flags.complete(); err != nil {
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
	flags.StringVar(&f.options.Host, "host", "", "address to listen on (default: all)")
	flags.IntVar(&f.options.Port, "port", 8000, "port for clients")
	flags.IntVar(&f.options.MetricsPort, "metrics-port", 9090, "port for /healthz, /readyz and /metrics")
	flags.IntVar(&f.options.PrivatePort, "private-port", managerauth.Port, "port (TLS) for observations and live samples, for clients with a certificate of the authority in $"+managerauth.AuthorityVariable+" (PEM); closed if the variable is not set")
	flags.StringVar(&f.options.SnapshotDir, "snapshot-dir", "/var/lib/semmoe", "directory for plans and the last known endpoints, which allow the router to start without the API server")
	flags.StringVar(&f.options.TablesFile, "tables-file", "", "JSON file that maps the digest of a pod's plan to the digest of a plan with the same layout whose tables replace its own; optional, re-read every few seconds")
	flags.StringVar(&f.planDir, "default-plan-dir", "", "directory with the mounted ConfigMap of the plan of pods that name no plan; for pods outside of MoEDeployments")
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
	flags.Int64Var(&f.options.MaxBodyBytes, "max-body-bytes", 32<<20, "maximum size of a request body in bytes; all request bodies together are limited to 384 MiB, and incomplete ones to 64 MiB or twice this value plus 1 MiB, whichever is larger")
	flags.IntVar(&f.options.MaxConnections, "max-connections", router.DefaultMaxConnections, "maximum number of client connections, or, with --endpoint-picker, of concurrent gateway requests")
	flags.DurationVar(&f.options.EndpointWait, "endpoint-wait", 10*time.Second, "maximum time that a request waits for a ready pod before it gets status 503")
	flags.DurationVar(&f.options.ClientTimeout, "client-timeout", time.Minute, "time limit for a client to send a request body, and to resume reading a response; 0 means no limit")
	flags.DurationVar(&f.options.ShutdownDelay, "shutdown-delay", 0, "time after SIGTERM during which the router is not ready but accepts new connections; a second signal ends it; not needed with a preStop hook that delays SIGTERM")
	flags.DurationVar(&f.options.DrainTimeout, "drain-timeout", 5*time.Minute, "time limit for in-flight requests after SIGTERM and --shutdown-delay")
	f.gateway.add(command)
}

// maxBodyBytesLimit is the maximum of --max-body-bytes, far above the size of a request of any model.
const maxBodyBytesLimit = 64 << 30

// complete checks the flags and sets the options that depend on several of them.
func (f *routerFlags) complete() (err error) {
	o := &f.options
	if o.Namespace == "" || o.Selector == "" {
		return errors.New("--namespace and --selector are required to find the engine pods")
	}
	if o.MaxBodyBytes < 0 || o.MaxBodyBytes > maxBodyBytesLimit {
		return fmt.Errorf("--max-body-bytes is %d: want 0 to %d", o.MaxBodyBytes, int64(maxBodyBytesLimit))
	}
	if o.MaxConnections < 1 {
		return fmt.Errorf("--max-connections is %d; it must be at least 1", o.MaxConnections)
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
	if o.EndpointPicker != nil && o.Pool.Hold != 0 {
		return fmt.Errorf("--hold is %v, but with --endpoint-picker requests do not wait because gateways have their own deadlines; want 0", o.Pool.Hold)
	}
	if o.Pool.Policy, err = dispatch.ParsePolicy(f.policy); err != nil {
		return fmt.Errorf("--policy: %w", err)
	}
	if o.Pool.Weights, err = dispatch.ParseWeights(f.weights); err != nil {
		return fmt.Errorf("--weights: %w", err)
	}
	if f.planDir != "" {
		mounted, err := bundle.Check(f.planDir, "")
		if err != nil {
			return fmt.Errorf("--default-plan-dir: %w", err)
		}
		o.DefaultPlan = string(mounted.Digest)
	}
	o.FetchPlan = planFetcher(o.Namespace)
	o.ManagerAuthority = []byte(os.Getenv(managerauth.AuthorityVariable))
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
	rest, err := config.GetConfig()
	if err != nil {
		return err
	}
	clients, err := kubernetes.NewForConfig(rest)
	if err != nil {
		return err
	}
	second := make(chan os.Signal, 1)
	defer context.AfterFunc(ctx, func() { signal.Notify(second, os.Interrupt, syscall.SIGTERM) })()
	f.options.EndDelay = second
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
	flags.StringVar(&g.certFile, "tls-cert-file", "", "PEM file with the certificate for gateways, re-read for each connection (default: a self-signed certificate)")
	flags.StringVar(&g.keyFile, "tls-key-file", "", "PEM file with the private key of --tls-cert-file")
	flags.StringVar(&g.clientCAFile, "tls-client-ca-file", "", "PEM file with the certificate authorities of gateways, re-read for each connection; requires gateways to have a certificate (default: no client certificates)")
	flags.BoolVar(&g.plaintext, "plaintext", false, "gateway connections without TLS")
}

// options returns nil if the router is a proxy.
func (g *gatewayFlags) options() (*router.EndpointPickerOptions, error) {
	switch {
	case !g.on && (g.plaintext || g.certFile != "" || g.keyFile != "" || g.clientCAFile != ""):
		return nil, errors.New("--plaintext, --tls-cert-file, --tls-key-file and --tls-client-ca-file require --endpoint-picker because they apply to gateway connections")
	case !g.on:
		return nil, nil
	case g.fallbacks < 0 || g.fallbacks > maxFallbacks:
		return nil, fmt.Errorf("--fallbacks is %d: want 0 to %d", g.fallbacks, maxFallbacks)
	case (g.certFile == "") != (g.keyFile == ""):
		return nil, fmt.Errorf("--tls-cert-file is %q and --tls-key-file %q: want both, or neither", g.certFile, g.keyFile)
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
// variables, or nil without a store. It creates a client for each plan: a token that cannot be read yet only fails an
// attempt, not the router.
func planFetcher(namespace string) plans.Fetch {
	if os.Getenv(artifact.URLVariable) == "" && os.Getenv(artifact.CAVariable) == "" {
		return nil
	}
	return func(ctx context.Context, digest, dir string) error {
		if bundle.IsComplete(dir, digest) { // needs neither the store nor its token
			return nil
		}
		client, err := access.FromPod(storeRetry)
		if err != nil {
			return err
		}
		return bundle.Fetch(ctx, client, namespace, digest, dir)
	}
}
