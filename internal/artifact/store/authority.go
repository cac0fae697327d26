package store

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/semmoe/operator/internal/authority"
)

const (
	// authoritySubject is what the store's certificate authority is called.
	authoritySubject = "semmoe artifact store"
	// caKey is where the ConfigMap holds the certificate for clients.
	caKey = "ca.crt"
)

// loadAuthority reads or makes the store's own certificate authority. Its key lies in a Secret, so that it outlives the pod and is
// shared by several; its certificate alone in a ConfigMap of the same name, for clients.
func loadAuthority(ctx context.Context, clients kubernetes.Interface, name types.NamespacedName) (*authority.Authority, error) {
	own, err := authority.Load(ctx, clients, name, authoritySubject, time.Now())
	if err != nil {
		return nil, err
	}
	bundle, err := own.Bundle()
	if err != nil {
		return nil, err
	}
	return own, publish(ctx, clients, name, string(bundle))
}

// publish gives the certificate to clients.
func publish(ctx context.Context, clients kubernetes.Interface, name types.NamespacedName, certificate string) error {
	maps := clients.CoreV1().ConfigMaps(name.Namespace)
	intent := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name},
		Data:       map[string]string{caKey: certificate},
	}
	_, err := maps.Create(ctx, intent, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		_, err = maps.Update(ctx, intent, metav1.UpdateOptions{})
	}
	if err != nil {
		return fmt.Errorf("publish the certificate authority in ConfigMap %s: %w", name, err)
	}
	return nil
}
