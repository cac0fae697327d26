// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	admissionac "k8s.io/client-go/applyconfigurations/admissionregistration/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/semmoe/operator/internal/certs"
)

const (
	// fieldManager owns only the certificate authority in the configuration. Manifests of the configuration omit that
	// field.
	fieldManager = "semmoe-webhook"
	// authoritySubject is the subject of the certificate authority.
	authoritySubject = "semmoe webhook"
	// keepPeriod is the interval at which the trust of the API server is verified. If the configuration is recreated,
	// reviews may fail for this time.
	keepPeriod = 30 * time.Second
)

// Certificates manages the certificate of a webhook server, and the API server's trust in it, without additional
// components such as cert-manager. Several managers share one certificate authority.
type Certificates struct {
	clients kubernetes.Interface
	// secret is the Secret of the authority. configuration is the name of the ValidatingWebhookConfiguration that
	// trusts it.
	secret        types.NamespacedName
	configuration string
	issuer        *certs.Issuer
	period        time.Duration
	now           func() time.Time
}

// NewCertificates returns Certificates for the names and addresses at which the API server reaches the webhook server.
// secret is the Secret that stores the authority. configuration is the name of the ValidatingWebhookConfiguration.
func NewCertificates(clients kubernetes.Interface, secret types.NamespacedName, configuration string, hosts ...string) *Certificates {
	return &Certificates{clients: clients, secret: secret, configuration: configuration, issuer: certs.NewIssuer(hosts...), period: keepPeriod, now: time.Now}
}

// TLS configures a webhook server to use the certificate.
func (c *Certificates) TLS(config *tls.Config) { config.GetCertificate = c.issuer.Certificate }

// NeedLeaderElection returns false, because every manager serves webhooks.
func (c *Certificates) NeedLeaderElection() bool { return false }

// Start maintains the certificate until the context ends. A repeated error is logged once and retried. The operator
// works without webhooks.
func (c *Certificates) Start(ctx context.Context) error {
	log := logr.FromContextOrDiscard(ctx).WithName("webhook")
	logged := ""
	for {
		switch err := c.keep(ctx); {
		case err == nil:
			logged = ""
		case err.Error() != logged && ctx.Err() == nil:
			logged = err.Error()
			log.Error(err, "Failed to maintain the webhook certificate")
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(c.period):
		}
	}
}

// keep renews the authority when it is due, and publishes the new authority before it is used.
func (c *Certificates) keep(ctx context.Context) error {
	own, err := certs.Renew(ctx, c.clients, c.secret, authoritySubject, c.now())
	if err != nil {
		return err
	}
	bundle, err := own.Bundle()
	if err != nil {
		return err
	}
	if err := c.trust(ctx, bundle); err != nil {
		return err
	}
	c.issuer.Use(own)
	return nil
}

// trust writes the CA bundle if the configuration has a different one. Without the configuration, the API server sends
// no reviews.
func (c *Certificates) trust(ctx context.Context, bundle []byte) error {
	configurations := c.clients.AdmissionregistrationV1().ValidatingWebhookConfigurations()
	live, err := configurations.Get(ctx, c.configuration, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("failed to get ValidatingWebhookConfiguration %s: %w", c.configuration, err)
	}
	intent := admissionac.ValidatingWebhookConfiguration(c.configuration)
	differs := false
	for _, hook := range live.Webhooks {
		differs = differs || !bytes.Equal(hook.ClientConfig.CABundle, bundle)
		intent.WithWebhooks(admissionac.ValidatingWebhook().WithName(hook.Name).WithClientConfig(admissionac.WebhookClientConfig().WithCABundle(bundle...)))
	}
	if !differs {
		return nil
	}
	if _, err := configurations.Apply(ctx, intent, metav1.ApplyOptions{FieldManager: fieldManager, Force: true}); err != nil {
		return fmt.Errorf("failed to write the certificate authority to ValidatingWebhookConfiguration %s: %w", c.configuration, err)
	}
	return nil
}
