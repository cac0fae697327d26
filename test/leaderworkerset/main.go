// SPDX-License-Identifier: Apache-2.0

// Command leaderworkerset runs the controllers and webhooks of the LeaderWorkerSet release that go.mod pins, in a pod whose service
// account may do everything. It is a separate module, so that none of it reaches the operator's go.mod.
//
// The release's own program wants a certificate controller, a Service in front of its webhooks and the CRDs of a batch scheduler;
// this one has the API server call its webhooks at the address of its pod. They are registered once its controllers run: who waits
// for the configurations waits for those too.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/webhook"

	leaderworkersetv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"
	"sigs.k8s.io/lws/pkg/controllers"
	"sigs.k8s.io/lws/pkg/webhooks"
)

func main() {
	host := flag.String("host", "", "address of the pod, where the API server reaches the webhooks")
	flag.Parse()
	ctrl.SetLogger(zap.New())
	if err := run(ctrl.SetupSignalHandler(), *host); err != nil {
		fmt.Fprintln(os.Stderr, "leaderworkerset:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, host string) error {
	if host == "" {
		return errors.New("--host is required")
	}
	config, err := rest.InClusterConfig()
	if err != nil {
		return err
	}
	config.QPS, config.Burst = 500, 500
	scheme := runtime.NewScheme()
	if err := clientgoscheme.AddToScheme(scheme); err != nil {
		return err
	}
	if err := leaderworkersetv1.AddToScheme(scheme); err != nil {
		return err
	}
	hooks := envtest.WebhookInstallOptions{
		MutatingWebhooks: []*admissionv1.MutatingWebhookConfiguration{mutating()}, ValidatingWebhooks: []*admissionv1.ValidatingWebhookConfiguration{validating()},
		LocalServingHost: host,
	}
	if err := hooks.PrepWithoutInstalling(); err != nil {
		return err
	}
	manager, err := ctrl.NewManager(config, ctrl.Options{
		Scheme: scheme, Metrics: metricsserver.Options{BindAddress: "0"},
		WebhookServer: webhook.NewServer(webhook.Options{Host: hooks.LocalServingHost, Port: hooks.LocalServingPort, CertDir: hooks.LocalServingCertDir}),
	})
	if err != nil {
		return err
	}
	if err := setUp(manager); err != nil {
		return err
	}
	go func() {
		<-manager.Elected()
		if err := hooks.Install(config); err != nil {
			fmt.Fprintln(os.Stderr, "leaderworkerset: install webhooks:", err)
			os.Exit(1)
		}
	}()
	return manager.Start(ctx)
}

func setUp(manager ctrl.Manager) error {
	if err := controllers.SetupIndexes(manager.GetFieldIndexer()); err != nil {
		return err
	}
	recorder := manager.GetEventRecorder("leaderworkerset")
	if err := controllers.NewLeaderWorkerSetReconciler(manager.GetClient(), manager.GetScheme(), recorder).SetupWithManager(manager); err != nil {
		return err
	}
	if err := controllers.NewPodReconciler(manager.GetClient(), manager.GetScheme(), recorder, nil).SetupWithManager(manager); err != nil {
		return err
	}
	if err := webhooks.SetupLeaderWorkerSetWebhook(manager); err != nil {
		return err
	}
	return webhooks.NewPodWebhook(nil).Setup(manager)
}
