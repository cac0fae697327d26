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
	// options hold what flags say as it is; complete adds the rest.
	options                                       router.Options
	engine, liveSamples, policy, weights, planDir string
	gateway                                       gatewayFlags
}

func newRouterCommand() *cobra.Command {
	var flags routerFlags
	command := &cobra.Command{
		Annotations: map[string]string{drains: "true"},
		Use:         "router",
		Short:       "Send requests to the ranks of engine pods",
		Long: "Send requests to the ranks of the engine pods of one MoEDeployment, or of a workload of yours. Ranks are chosen by the plans\n" +
			"that the pods name, or --default-plan-dir holds, which come from the artifact store that the environment variables " + access.URLVariable + " and " + access.CAVariable + " name;\n" +
			"without them, by load alone. With --endpoint-picker it sends nothing itself: it is the endpoint picker (ext_proc) of an\n" +
			"InferencePool, and chooses for a gateway such as Envoy.",
		Args: usageArgs,
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
	flags.StringVar(&f.options.Namespace, "namespace", "", "namespace of the engine pods")
	flags.StringVar(&f.options.Selector, "selector", "", "label selector of the engine pods")
	flags.StringVar(&f.options.Host, "host", "", "address to listen on (default: all)")
	flags.IntVar(&f.options.Port, "port", 8000, "port for clients")
	flags.IntVar(&f.options.MetricsPort, "metrics-port", 9090, "port for /healthz, /readyz and /metrics")
	flags.IntVar(&f.options.PrivatePort, "private-port", managerauth.Port, "port (TLS) for observations and live samples, for clients with a certificate of the authority in $"+managerauth.AuthorityVariable+" (PEM); closed where that is not set")
	flags.StringVar(&f.options.SnapshotDir, "snapshot-dir", "/var/lib/semmoe", "directory in which the last known endpoints and the plans are kept, so that the router can start without the API server")
	flags.StringVar(&f.options.TablesFile, "tables-file", "", "JSON object that says, by the digest of a plan that pods name, of which plan with the same layout the tables are used in the place of its own; read every few seconds, and may be absent")
	flags.StringVar(&f.planDir, "default-plan-dir", "", "directory with the mounted ConfigMap of a plan, under which those pods serve that name none themselves; for pods that no MoEDeployment has made")
	flags.StringVar(&f.engine, "engine", "SGLang", "type of the engines whose pods do not name theirs (annotation "+semmoev1.AnnotationEngine+"): "+registry.Types())
	flags.IntVar(&f.options.SamplePercent, "sample-percent", 0, "share of requests of which the engine is asked for the experts that their tokens activated")
	flags.IntVar(&f.options.ExpertLoadSeries, "expert-load-series", expertload.DefaultSeries, fmt.Sprintf("number of experts with the highest load, and with the lowest, that have metrics of their own (0 to %d)", expertload.MaxSeries))
	flags.StringVar(&f.liveSamples, "live-samples", string(livesamples.Counts), "what is kept of the tokens of sampled requests: counts of token ids, experts and hashed bigrams; sequences, which also keeps prompts and answers as token ids; or none")
	defaults := router.DefaultPoolOptions()
	flags.StringVar(&f.policy, "policy", string(defaults.Policy), "how ranks are chosen: price, masked, round-robin, least-loaded or prefix")
	flags.Float64Var(&f.options.Pool.Cap, "cap", defaults.Cap, "largest load of a rank over the last 128 requests, in fair shares (policies price and prefix)")
	flags.StringVar(&f.weights, "weights", "", "weights of what speaks for a rank, as in affinity=1,prefix=1,load=1,wait=1; 1 is as modelled in microseconds, 0 leaves it out (policy price)")
	flags.DurationVar(&f.options.Pool.Hold, "hold", 0, "how long a request may wait for the rank of its experts while that has had more than its share of the last 128 requests, at most "+dispatch.MostHold.String()+": more is local, and answers begin that much later; 0 is not at all (policy price)")
	flags.IntVar(&f.options.Pool.PendingLimitPerRank, "pending-limit-per-rank", 0, "requests that a rank of a pod may have at a time; when all have as many, clients are answered 429. 0 is no limit")
	flags.IntVar(&f.options.Pool.CacheTokensPerRank, "cache-tokens-per-rank", defaults.CacheTokensPerRank, "tokens that a rank keeps in its KV cache, as far as the router knows")
	flags.Int64Var(&f.options.MaxBodyBytes, "max-body-bytes", 32<<20, "maximum size of a request body in bytes; all requests may hold 384 MiB at once, and requests that are still arriving 64 MiB, or twice this and 1 MiB where that is more")
	flags.IntVar(&f.options.MaxConnections, "max-connections", router.DefaultMaxConnections, "maximum connections of clients, or, with --endpoint-picker, requests of gateways at a time")
	flags.DurationVar(&f.options.EndpointWait, "endpoint-wait", 10*time.Second, "how long a request waits for a ready pod before it is answered with 503")
	flags.DurationVar(&f.options.ClientTimeout, "client-timeout", time.Minute, "how long a client may take to send a body, and how long it may take nothing of an answer; 0 for ever")
	flags.DurationVar(&f.options.ShutdownDelay, "shutdown-delay", 0, "time for which the router accepts new connections after SIGTERM although it is not ready; a second signal ends it. Not needed where a preStop hook delays SIGTERM")
	flags.DurationVar(&f.options.DrainTimeout, "drain-timeout", 5*time.Minute, "time limit for running requests, after SIGTERM and --shutdown-delay")
	f.gateway.add(command)
}

// mostBodyBytes is far more than a request of any model is.
const mostBodyBytes = 64 << 30

// complete checks the flags, and makes the options of what they say.
func (f *routerFlags) complete() (err error) {
	o := &f.options
	if o.Namespace == "" || o.Selector == "" {
		return errors.New("--namespace and --selector are required: they find the engine pods")
	}
	if o.MaxBodyBytes < 0 || o.MaxBodyBytes > mostBodyBytes {
		return fmt.Errorf("--max-body-bytes is %d: want 0 to %d", o.MaxBodyBytes, int64(mostBodyBytes))
	}
	if o.MaxConnections < 1 {
		return fmt.Errorf("--max-connections: %d is invalid: at least 1", o.MaxConnections)
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
		return fmt.Errorf("--hold is %v: with --endpoint-picker no request waits, since a gateway has deadlines of its own; want 0", o.Pool.Hold)
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

// completeEngine adds what is known about engines of the type, and refuses what they cannot do.
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
	if o.SamplePercent > 0 && !adapter.TellsExperts() {
		return fmt.Errorf("--sample-percent is %d: engine %s does not return the routed experts of requests; want 0", o.SamplePercent, f.engine)
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
	return router.Run(withLogger(ctx, "router"), clients, f.options)
}

// mostFallbacks bounds a header: who has tried so many endpoints has no use for another.
const mostFallbacks = 16

// gatewayFlags are the flags of a router that chooses for a gateway.
type gatewayFlags struct {
	on, plaintext    bool
	port, healthPort int
	fallbacks        int
	// The files of TLS.
	certFile, keyFile, clientCAFile string
}

func (g *gatewayFlags) add(command *cobra.Command) {
	flags := command.Flags()
	flags.BoolVar(&g.on, "endpoint-picker", false, "choose for a gateway (Envoy ext_proc, endpoint picker protocol 1.0) instead of proxying; --port and --endpoint-wait are not used then")
	flags.IntVar(&g.port, "ext-proc-port", 9002, "port for gateways, with --endpoint-picker")
	flags.IntVar(&g.healthPort, "health-port", 9003, "port for gRPC health checks without TLS, with --endpoint-picker")
	flags.IntVar(&g.fallbacks, "fallbacks", 2, "endpoints that a gateway is told to try after the chosen one, with --endpoint-picker; 0 for one that reads a single endpoint, such as Envoy's ORIGINAL_DST cluster")
	flags.StringVar(&g.certFile, "tls-cert-file", "", "PEM file with the certificate for gateways, read anew for each connection (default: one that the router makes and signs itself)")
	flags.StringVar(&g.keyFile, "tls-key-file", "", "PEM file with the key of --tls-cert-file")
	flags.StringVar(&g.clientCAFile, "tls-client-ca-file", "", "PEM file with the certificate authorities of gateways, read anew for each connection; gateways then need a certificate (default: none is asked for)")
	flags.BoolVar(&g.plaintext, "plaintext", false, "speak to gateways without TLS")
}

// options are nil where the router is a proxy.
func (g *gatewayFlags) options() (*router.EndpointPickerOptions, error) {
	switch {
	case !g.on && (g.plaintext || g.certFile != "" || g.keyFile != "" || g.clientCAFile != ""):
		return nil, errors.New("--plaintext, --tls-cert-file, --tls-key-file and --tls-client-ca-file need --endpoint-picker: they are for the connections of gateways")
	case !g.on:
		return nil, nil
	case g.fallbacks < 0 || g.fallbacks > mostFallbacks:
		return nil, fmt.Errorf("--fallbacks is %d: want 0 to %d", g.fallbacks, mostFallbacks)
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

// storeRetry bounds one attempt to fetch a plan from a store that is away; attempts are repeated with pauses.
const storeRetry = 10 * time.Second

// planFetcher brings the plans of a namespace from the artifact store that the environment names; it is nil where that
// names none. The client is made for each plan: a token that cannot be read yet costs an attempt, not the router.
func planFetcher(namespace string) plans.Fetch {
	if os.Getenv(access.URLVariable) == "" && os.Getenv(access.CAVariable) == "" {
		return nil
	}
	return func(ctx context.Context, digest, dir string) error {
		if bundle.Holds(dir, digest) { // needs neither the store nor its token
			return nil
		}
		client, err := access.FromPod(storeRetry)
		if err != nil {
			return err
		}
		return bundle.Fetch(ctx, client, namespace, digest, dir)
	}
}
