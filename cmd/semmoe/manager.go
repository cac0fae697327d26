package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/semmoe/operator/controllers"
	"github.com/semmoe/operator/controllers/retention"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/promquery"
	"github.com/semmoe/operator/internal/router/managerauth"
	"github.com/semmoe/operator/webhook"
)

// stopTimeout bounds the time between a signal and the release of the leader lease. It leaves a third of endGrace to the release, of which
// releaseTimeout may be used.
const stopTimeout = time.Second

func newManagerCommand() *cobra.Command {
	var options controllers.Options
	var store access.Access
	var storeCA, pull, routerAuthority, metricsAddress, healthAddress string
	var prometheusHosts []string
	var webhooks webhookOptions
	// A lost leader is replaced within 20 s: a successor may see its last renewal 2.2 retry periods late, waits for the lease to pass,
	// and may ask for it 2.2 periods after that (client-go's jitter). A leader that stops in order releases its lease at once.
	lease, renew, retry := 15*time.Second, 10*time.Second, time.Second
	stop := stopTimeout
	base := ctrl.Options{
		Metrics:                       metricsserver.Options{BindAddress: noServer},
		HealthProbeBindAddress:        noServer,
		LeaderElectionID:              "manager.semmoe.io",
		LeaderElectionReleaseOnCancel: true,
		GracefulShutdownTimeout:       &stop,
		LeaseDuration:                 &lease,
		RenewDeadline:                 &renew,
		RetryPeriod:                   &retry,
	}
	command := &cobra.Command{
		Use:   "manager",
		Short: "Run the operator's controllers",
		Args:  usageArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			ctx := withLogger(command.Context(), "manager")
			var err error
			if options.PullPolicy, err = pullPolicy(pull); err != nil {
				return err
			}
			config, err := ctrl.GetConfig()
			if err != nil {
				return err
			}
			if options.Image == "" {
				if options.Image, err = ownImage(ctx, config); err != nil {
					return fmt.Errorf("--image is not set, and the image of this pod cannot be read: %w", err)
				}
			}
			if store.CA, err = namespacedName("--store-ca", storeCA); err != nil {
				return err
			}
			if options.PrometheusHosts, err = promquery.ParseHosts(prometheusHosts); err != nil {
				return fmt.Errorf("--prometheus-hosts: %w", err)
			}
			options.Store, options.OwnNamespace = &store, os.Getenv("POD_NAMESPACE")
			base.LeaderElectionNamespace = options.OwnNamespace
			if options.Routers, err = routerIdentity(ctx, config, routerAuthority); err != nil {
				return err
			}
			var certificates *webhook.Certificates
			if webhooks.enabled() {
				if base.WebhookServer, certificates, err = webhooks.server(config); err != nil {
					return err
				}
			}
			if base.LeaderElection {
				base.LeaderElectionConfig = leaseConfig(ctx, config)
			}
			manager, err := controllers.NewManager(config, options, base)
			if err != nil {
				return err
			}
			ready := map[string]healthz.Checker{"ping": healthz.Ping}
			if webhooks.enabled() {
				if err := webhooks.serve(manager, certificates, options.PrometheusHosts); err != nil {
					return err
				}
				ready["webhook"] = base.WebhookServer.StartedChecker()
			}
			if err := errors.Join(addMetricsServer(manager, metricsAddress), addHealthServer(manager, healthAddress, ready)); err != nil {
				return err
			}
			return manager.Start(ctx)
		},
	}
	flags := command.Flags()
	flags.StringVar(&options.Image, "image", "", "image of the operator's own containers: request router and inspection (default: the image of the pod that $POD_NAMESPACE and $POD_NAME name)")
	flags.StringVar(&pull, "image-pull-policy", "", "when nodes pull that image for what is made from now on: Always, IfNotPresent or Never (default: as the API server has it for the image's name)")
	flags.StringSliceVar(&options.Namespaces, "namespaces", nil, "namespaces to watch (default: all)")
	flags.StringVar(&store.URL, "store-url", "", "address of the artifact store, https://host; without it nothing is profiled or planned")
	flags.StringVar(&storeCA, "store-ca", cmp.Or(os.Getenv("POD_NAMESPACE"), "semmoe-system")+"/semmoe-store-ca", "namespace/name of the ConfigMap with the store's certificate authority as ca.crt")
	flags.StringVar(&store.TokenFile, "store-token-file", access.TokenFile, "file with the manager's token for the store")
	flags.StringVar(&routerAuthority, "router-client-authority", cmp.Or(os.Getenv("POD_NAMESPACE"), "semmoe-system")+"/"+managerauth.SecretName, "namespace/name of the Secret with the certificate authority by which request routers know managers; created where it does not exist")
	flags.StringSliceVar(&prometheusHosts, "prometheus-hosts", nil, "hosts (name or IP address, optionally with a port) that drift.prometheus.address of every namespace may name; Services with a cluster IP of the object's own namespace are always allowed")
	flags.IntVar(&options.SolverWorkers, "solver-workers", 1, "plans that are solved at a time; each holds a routing trace in memory")
	flags.DurationVar(&options.Retention, "artifact-retention", retention.DefaultRetention, "how long artifacts are kept in the store after an object last named them")
	flags.StringVar(&metricsAddress, "metrics-bind-address", ":8443", "address of the metrics endpoint (HTTPS; the API server authenticates and authorizes its callers); 0 turns it off")
	flags.StringVar(&healthAddress, "health-probe-bind-address", ":8081", "address of /healthz and /readyz")
	webhooks.addFlags(flags)
	flags.BoolVar(&base.LeaderElection, "leader-elect", false, "elect a leader among several managers")
	return command
}

// pullPolicy reads --image-pull-policy, which may be empty.
func pullPolicy(text string) (corev1.PullPolicy, error) {
	switch policy := corev1.PullPolicy(text); policy {
	case "", corev1.PullAlways, corev1.PullIfNotPresent, corev1.PullNever:
		return policy, nil
	}
	return "", fmt.Errorf("--image-pull-policy %q: must be Always, IfNotPresent or Never", text)
}

// ownImage is the image that this process runs from, as its pod names it.
func ownImage(ctx context.Context, config *rest.Config) (string, error) {
	clients, err := kubernetes.NewForConfig(config)
	if err != nil {
		return "", err
	}
	namespace, name := os.Getenv("POD_NAMESPACE"), os.Getenv("POD_NAME")
	if namespace == "" || name == "" {
		return "", fmt.Errorf("the environment variables POD_NAMESPACE and POD_NAME are not set")
	}
	pod, err := clients.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	for _, container := range pod.Spec.Containers {
		if container.Name == "manager" {
			return container.Image, nil
		}
	}
	return "", fmt.Errorf("pod %s/%s has no container named manager", namespace, name)
}

// routerIdentity loads the identity by which request routers know this manager.
func routerIdentity(ctx context.Context, config *rest.Config, secret string) (*managerauth.Identity, error) {
	name, err := namespacedName("--router-client-authority", secret)
	if err != nil {
		return nil, err
	}
	clients, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	return managerauth.Load(ctx, clients, name)
}
