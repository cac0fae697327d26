// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	ctrlwebhook "sigs.k8s.io/controller-runtime/pkg/webhook"

	"github.com/semmoe/operator/internal/files/regularfile"
	"github.com/semmoe/operator/internal/observation/promquery"
	"github.com/semmoe/operator/webhook"
)

// webhookOptions are the options of the manager's admission webhooks.
type webhookOptions struct {
	address       string
	certDir       string
	service       string
	secret        string
	configuration string
}

func (o *webhookOptions) addFlags(flags *pflag.FlagSet) {
	flags.StringVar(&o.address, "webhook-bind-address", "0", "address of the admission webhooks (HTTPS); 0 disables them")
	flags.StringVar(&o.certDir, "webhook-cert-dir", "", "directory with the webhooks' tls.crt and tls.key, for example from cert-manager, which must then inject its certificate authority into the webhook configuration (default: the manager's own certificate authority)")
	flags.StringVar(&o.service, "webhook-service", "semmoe-webhook", "Service of the webhooks in $POD_NAMESPACE, and source of the host names in their certificate")
	flags.StringVar(&o.secret, "webhook-authority", "semmoe-webhook-ca", "Secret in $POD_NAMESPACE with the certificate authority of the webhooks; created if missing")
	flags.StringVar(&o.configuration, "webhook-configuration", "semmoe", "ValidatingWebhookConfiguration that receives the certificate authority")
}

func (o *webhookOptions) enabled() bool { return o.address != "0" }

// server returns the manager's webhook server, and the controller of its certificate, which is nil if the certificate
// is in certDir.
func (o *webhookOptions) server(config *rest.Config) (ctrlwebhook.Server, *webhook.Certificates, error) {
	host, portText, err := net.SplitHostPort(o.address)
	if err != nil {
		return nil, nil, fmt.Errorf("--webhook-bind-address %q: %w", o.address, err)
	}
	port, err := strconv.ParseUint(portText, 10, 16)
	if err != nil || port == 0 {
		return nil, nil, fmt.Errorf("--webhook-bind-address %q: the port must be a number from 1 to 65535", o.address)
	}
	address := net.JoinHostPort(host, strconv.FormatUint(port, 10))
	if o.certDir != "" {
		for _, name := range []string{"tls.crt", "tls.key"} {
			if err := regularfile.Check(filepath.Join(o.certDir, name)); err != nil {
				return nil, nil, fmt.Errorf("--webhook-cert-dir: %w", err)
			}
		}
		return newWebhookServer(address, o.certDir, nil), nil, nil
	}
	namespace := os.Getenv("POD_NAMESPACE")
	if namespace == "" {
		return nil, nil, fmt.Errorf("--webhook-bind-address %q without --webhook-cert-dir requires the environment variable POD_NAMESPACE, the namespace of Service and Secret", o.address)
	}
	clients, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, nil, err
	}
	name := o.service + "." + namespace
	certificates := webhook.NewCertificates(clients, types.NamespacedName{Namespace: namespace, Name: o.secret}, o.configuration, name+".svc", name+".svc.cluster.local")
	return newWebhookServer(address, "", certificates.TLS), certificates, nil
}

// serve adds the webhooks to a manager that uses the webhook server.
func (o *webhookOptions) serve(manager ctrl.Manager, certificates *webhook.Certificates, hosts promquery.Hosts) error {
	if certificates != nil {
		if err := manager.Add(certificates); err != nil {
			return fmt.Errorf("failed to set up the certificate of the webhooks: %w", err)
		}
	}
	return webhook.Add(manager, hosts)
}
