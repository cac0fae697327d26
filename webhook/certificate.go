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

	"github.com/semmoe/operator/internal/authority"
)

const (
	// fieldManager owns the certificate authority in the configuration, and nothing else of it: whoever applies the configuration
	// leaves the field out.
	fieldManager = "semmoe-webhook"
	// authoritySubject is what the certificate authority is called.
	authoritySubject = "semmoe webhook"
	// keepPeriod is how often it is seen to that the API server trusts us: as long may reviews be missed after the configuration was
	// made anew.
	keepPeriod = 30 * time.Second
)

// Certificates keeps the certificate of a webhook server, and the trust of the API server in it, without anything installed beside
// the operator. Several managers share one authority.
type Certificates struct {
	clients kubernetes.Interface
	// secret holds the authority, configuration is the ValidatingWebhookConfiguration that trusts it.
	secret        types.NamespacedName
	configuration string
	issuer        *authority.Issuer
	period        time.Duration
	now           func() time.Time
}

// NewCertificates returns those for the names and addresses by which the API server reaches the webhook server. secret is where the
// authority is kept; configuration is the name of the ValidatingWebhookConfiguration.
func NewCertificates(clients kubernetes.Interface, secret types.NamespacedName, configuration string, hosts ...string) *Certificates {
	return &Certificates{clients: clients, secret: secret, configuration: configuration, issuer: authority.NewIssuer(hosts...), period: keepPeriod, now: time.Now}
}

// TLS lets a webhook server use them.
func (c *Certificates) TLS(config *tls.Config) { config.GetCertificate = c.issuer.Certificate }

// NeedLeaderElection: every manager serves.
func (c *Certificates) NeedLeaderElection() bool { return false }

// Start keeps them until the context ends. An error is logged once for as long as it stays the same: it is tried again, and the
// operator works without webhooks.
func (c *Certificates) Start(ctx context.Context) error {
	log := logr.FromContextOrDiscard(ctx).WithName("webhook")
	told := ""
	for {
		switch err := c.keep(ctx); {
		case err == nil:
			told = ""
		case err.Error() != told && ctx.Err() == nil:
			told = err.Error()
			log.Error(err, "Keeping the webhook's certificate")
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(c.period):
		}
	}
}

// keep renews the authority where that is due, and has it trusted before it is used.
func (c *Certificates) keep(ctx context.Context) error {
	own, err := authority.Renew(ctx, c.clients, c.secret, authoritySubject, c.now())
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

// trust writes the bundle where the configuration has another one. Where there is no configuration nobody asks.
func (c *Certificates) trust(ctx context.Context, bundle []byte) error {
	configurations := c.clients.AdmissionregistrationV1().ValidatingWebhookConfigurations()
	live, err := configurations.Get(ctx, c.configuration, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("get ValidatingWebhookConfiguration %s: %w", c.configuration, err)
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
		return fmt.Errorf("write the certificate authority into ValidatingWebhookConfiguration %s: %w", c.configuration, err)
	}
	return nil
}
