// SPDX-License-Identifier: Apache-2.0

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

	"github.com/semmoe/operator/internal/certs"
)

const (
	// authoritySubject is the common name of the store's CA.
	authoritySubject = "semmoe artifact store"
	// caKey is the ConfigMap key of the CA certificate.
	caKey = "ca.crt"
	// publishPeriod is the interval at which the published certificate is checked. Without the certificate, the manager
	// assumes that there is no store.
	publishPeriod = time.Minute
)

// loadAuthority loads or creates the CA of the store, and publishes its certificate. The key is in a Secret, so that it
// outlives the pod and is shared by several pods. Only the certificate is in the ConfigMap of the same name, for
// clients.
func loadAuthority(ctx context.Context, clients kubernetes.Interface, name types.NamespacedName) (_ *certs.Authority, certificate string, _ error) {
	own, err := certs.Load(ctx, clients, name, authoritySubject, time.Now())
	if err != nil {
		return nil, "", err
	}
	bundle, err := own.Bundle()
	if err != nil {
		return nil, "", err
	}
	return own, string(bundle), publish(ctx, clients, name, string(bundle))
}

// keepPublished republishes the certificate if its ConfigMap is deleted or changed, until the context ends.
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
			log.Error(err, "Failed to publish the CA certificate, retrying")
		}
	}
}

// republish publishes the certificate, unless the Secret contains a different CA. The certificate of that CA is
// published by the stores that started with it, and two stores must not overwrite each other's certificate.
func republish(ctx context.Context, clients kubernetes.Interface, name types.NamespacedName, certificate string) error {
	secret, err := clients.CoreV1().Secrets(name.Namespace).Get(ctx, name.Name, metav1.GetOptions{})
	if err == nil && string(secret.Data[corev1.TLSCertKey]) != certificate {
		return nil
	}
	return publish(ctx, clients, name, certificate)
}

// publish writes the certificate to the ConfigMap for clients. It writes only if the certificate differs, and keeps
// labels and annotations of other controllers, for example of those that copy ConfigMaps to other namespaces.
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
		return fmt.Errorf("failed to publish the CA certificate in ConfigMap %s: %w", name, err)
	}
	return nil
}

// raced reports whether another client wrote at the same time.
func raced(err error) bool {
	return apierrors.IsAlreadyExists(err) || apierrors.IsConflict(err) || apierrors.IsNotFound(err)
}
