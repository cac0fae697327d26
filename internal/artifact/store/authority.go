package store

import (
	"context"
	"fmt"
	"maps"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/retry"

	"github.com/semmoe/operator/internal/authority"
)

const (
	// authoritySubject is what the store's certificate authority is called.
	authoritySubject = "semmoe artifact store"
	// caKey is where the ConfigMap holds the certificate for clients.
	caKey = "ca.crt"
	// publishPeriod is how often the published certificate is looked at: without it, whoever hands it to clients takes it that there is
	// no store.
	publishPeriod = time.Minute
)

// loadAuthority reads or makes the store's own certificate authority, and publishes its certificate. Its key lies in a Secret, so that
// it outlives the pod and is shared by several; its certificate alone in a ConfigMap of the same name, for clients.
func loadAuthority(ctx context.Context, clients kubernetes.Interface, name types.NamespacedName) (_ *authority.Authority, certificate string, _ error) {
	own, err := authority.Load(ctx, clients, name, authoritySubject, time.Now())
	if err != nil {
		return nil, "", err
	}
	bundle, err := own.Bundle()
	if err != nil {
		return nil, "", err
	}
	return own, string(bundle), publish(ctx, clients, name, string(bundle))
}

// keepPublished keeps the certificate published until the context ends: its ConfigMap may be deleted, or changed.
func keepPublished(ctx context.Context, clients kubernetes.Interface, name types.NamespacedName, certificate string, period time.Duration) {
	log := logr.FromContextOrDiscard(ctx)
	ticks := time.NewTicker(period)
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
		}
		if err := republish(ctx, clients, name, certificate); err != nil && ctx.Err() == nil {
			log.Error(err, "Publishing the certificate authority later")
		}
	}
}

// republish publishes the certificate, unless the Secret has another authority by now: that one's is published by the stores that
// have started with it, and two kinds of stores must not take turns.
func republish(ctx context.Context, clients kubernetes.Interface, name types.NamespacedName, certificate string) error {
	secret, err := clients.CoreV1().Secrets(name.Namespace).Get(ctx, name.Name, metav1.GetOptions{})
	if err == nil && string(secret.Data[corev1.TLSCertKey]) != certificate {
		return nil
	}
	return publish(ctx, clients, name, certificate)
}

// publish gives the certificate to clients. It writes only what differs, and leaves labels and annotations of others, such as those
// by which a ConfigMap is copied into more namespaces.
func publish(ctx context.Context, clients kubernetes.Interface, name types.NamespacedName, certificate string) error {
	configMaps, wanted := clients.CoreV1().ConfigMaps(name.Namespace), map[string]string{caKey: certificate}
	err := retry.OnError(retry.DefaultRetry, raced, func() error {
		current, err := configMaps.Get(ctx, name.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			created := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name}, Data: wanted}
			_, err = configMaps.Create(ctx, created, metav1.CreateOptions{})
		case err == nil && !maps.Equal(current.Data, wanted):
			current.Data = wanted
			_, err = configMaps.Update(ctx, current, metav1.UpdateOptions{})
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("publish the certificate authority in ConfigMap %s: %w", name, err)
	}
	return nil
}

// raced reports whether another store, or somebody else, wrote at the same time.
func raced(err error) bool {
	return apierrors.IsAlreadyExists(err) || apierrors.IsConflict(err) || apierrors.IsNotFound(err)
}
